// Sampled softmax: the loss of every position against its negatives, and its gradients.
//
// Forward: the positive is scored first, then negatives in segments that fit the first-level cache; if a gradient
// is needed, they are summed with their weights while they are there. A segment with a higher logit than all
// before it scales down what has been summed so far. The sum is the gradient of the query for a unit gradient of the
// loss, so the backward never gathers negatives again.
//
// A position has negatives of its own and is scored by itself, or shares them with its group; then a segment of them is
// unpacked once and all products are products of matrices.
//
// Scoring reads a copy of the rows if each is used many times or if negatives are narrower than floats: unit vectors,
// padded to whole vectors. Positives are never narrowed.
//
// Backward to the rows: see row_sums.h. Positions are taken in portions, so the terms of the sums, and the
// probabilities if the forward did not keep them, stay within a fixed budget.

#include "candidates.h"
#include "narrow.h"
#include "row_sums.h"
#include "tile_gemm.h"
#include "unit_vectors.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

constexpr int64_t kPortion = int64_t(1) << 18;  // pairs of a position and a candidate distributed at once
constexpr int64_t kWorthCopying = 4;            // uses of the average row from which a copy of all rows pays

enum Precision : int64_t { kFloat = 0, kHalf = 1, kInt8 = 2 };

// Group g holds the positions from offsets[g] to offsets[g + 1], at most `largest`, and has negatives [num_groups, n].
// Null offsets: every position is a group of its own.
struct Problem {
  const float *queries, *rows;
  const int32_t *positives, *negatives;
  const float* log_q;  // may be null
  const int64_t* offsets;
  int64_t num_positions, num_groups, largest, num_negatives, num_rows, width;
  float inverse_temperature;
  bool normalize;
  Precision precision;

  int64_t first(int64_t group) const { return offsets != nullptr ? offsets[group] : group; }
  const int32_t* negatives_of(int64_t group) const { return negatives + group * num_negatives; }
};

// Rows as negatives are read. A copy holds unit vectors in whole vectors of lanes, zeros after the end; else these are
// the caller's rows, with their inverse norms as scales if they are to be normalised.
template <class Number>
struct Table {
  const Number* rows;
  int64_t width;
  const float* scales;  // may be null
};

// Factor of a copied row besides `inverse`; its reciprocal is stored in the scales.
float narrowing(const float*, const float*, int64_t, float) { return 1.0f; }
float narrowing(const Half*, const float*, int64_t, float) { return 1.0f; }
float narrowing(const int8_t*, const float* row, int64_t width, float inverse) {
  vf largest{};
  for_vectors(width, [&](int64_t c, int count) {
    const vf x = load_some(row + c, count);
    largest = max_of(largest, max_of(x, -x));
  });
  const float top = max_lane(largest) * inverse;
  return top > 0.0f ? 127.0f / top : 1.0f;
}

// Copies of rows with their inverse norms and, for bytes, their scales.
template <class Number>
class RowCopy {
 public:
  // `inverse_rows` is filled if rows are to be normalised; without a copy, that is all that is done.
  RowCopy(const Problem& p, bool copied, float* inverse_rows)
      : copied_(copied),
        width_(copied ? round_up(p.width, kLanes) : p.width),
        rows_(copied ? p.num_rows * width_ : 1),
        scales_(kScaled ? p.num_rows : 1),
        plain_(p.rows),
        inverse_(p.normalize ? inverse_rows : nullptr) {
    if (!*this || !(copied_ || p.normalize)) return;
    parallel_blocks(p.num_rows, rows_per_block(2 * width_ * 4), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* from = p.rows + row * p.width;
        const float inverse = p.normalize ? inverse_norm(from, p.width) : 1.0f;
        if (p.normalize) inverse_rows[row] = inverse;
        if (!copied_) continue;
        const float factor = narrowing(rows_.data(), from, p.width, inverse);
        if (kScaled) {
          const float square = dot(from, from, p.width);
          scales_[row] = 1.0f / factor + (square - square);  // bytes cannot represent a NaN
        }
        Number* to = rows_.data() + row * width_;
        for_vectors(p.width,
                    [&](int64_t c, int count) { store(to + c, load_some(from + c, count) * inverse * factor); });
      }
    });
  }

  explicit operator bool() const { return rows_ && scales_; }

  Table<Number> table() {
    if (copied_) return {rows_.data(), width_, kScaled ? scales_.data() : nullptr};
    return {reinterpret_cast<const Number*>(plain_), width_, inverse_};
  }

 private:
  static constexpr bool kScaled = sizeof(Number) == 1;

  bool copied_;
  int64_t width_;
  Buffer<Number> rows_;
  Buffer<float> scales_;
  const float *plain_, *inverse_;
};

constexpr int64_t kSegment = 32;  // negatives of one position
static_assert(kSegment % kLanes == 0, "segments must hold whole vectors");

// The softmax of one position, built up segment by segment: the highest logit so far, which is at least the positive's,
// and the sum of the exponentials relative to it.
struct Softmax {
  float own, top, total;

  // Replaces logits, whole vectors of them, by their exponentials relative to the new top; what was summed before must
  // be multiplied by the result.
  float add(float* logits, int64_t n, vf highest) {
    const float higher = max_lane(max_of(highest, splat(top)));
    const float decay = std::exp(top - higher);
    vf sums{};
    for (int64_t j = 0; j < n; j += kLanes) {
      const vf logit = load(logits + j) - higher;
      const vf e = logit < -80.0f ? vf{} : exp_of(logit) + (logit - logit);  // exp_of drops a NaN, the zero keeps it
      store(logits + j, e);
      sums += e;
    }
    total = total * decay + sum(sums);
    top = higher;
    return decay;
  }

  float own_probability() const { return std::exp(own - top) / total; }
  float loss() const { return top - own + std::log(total); }
};

// A position's query, scaled so that its products with unit vectors are logits, and the sum for its gradient.
struct Query {
  float *scaled, *gradient;
  float inverse;
};

// Scores the positive, with which the sums begin.
Softmax begin_position(const Problem& p, const float* inverse_rows, int64_t position, Query& query) {
  const float* from = p.queries + position * p.width;
  const int32_t positive = p.positives[position];
  const float* row = p.rows + positive * p.width;
  query.inverse = p.normalize ? inverse_norm(from, p.width) : 1.0f;
  const float factor = query.inverse * p.inverse_temperature;
  const float scale = p.normalize ? inverse_rows[positive] : 1.0f;
  for_vectors(p.width, [&](int64_t c, int count) {
    store(query.scaled + c, load_some(from + c, count) * factor);
    store(query.gradient + c, load_some(row + c, count) * scale);
  });
  const float logit = dot(query.scaled, query.gradient, p.width);
  const float own = p.log_q != nullptr ? logit - p.log_q[positive] : logit;
  return {own, own, 1.0f};
}

// Turns the weighted sum of candidates into the gradient of the query for a unit gradient of the loss.
void finish_gradient(const Problem& p, const float* inverse_rows, int64_t position, const Softmax& softmax,
                     const Query& query) {
  const int32_t positive = p.positives[position];
  const float* row = p.rows + positive * p.width;
  const float scale = p.normalize ? inverse_rows[positive] : 1.0f;
  for_vectors(p.width, [&](int64_t c, int count) {
    const vf mean = load(query.gradient + c) * (1.0f / softmax.total);
    store(query.gradient + c, (mean - load_some(row + c, count) * scale) * p.inverse_temperature);
  });
  if (p.normalize) through_norm(p.queries + position * p.width, query.inverse, p.width, query.gradient);
}

// Exponentials relative to the tops at their time -> probabilities.
void finish_weights(const Softmax& softmax, const float* tops, int64_t segment, int64_t padded, float* weights) {
  for (int64_t begin = 0; begin < padded; begin += segment) {
    const float scale = std::exp(tops[begin / segment] - softmax.top) / softmax.total;
    for (int64_t j = begin; j < min_of(padded, begin + segment); j += kLanes)
      store(weights + j, load(weights + j) * scale);
  }
}

// Outputs of the positions; all but the loss may be null.
struct Results {
  float *loss, *inverse_queries, *probabilities, *unit_gradients;

  void write(const Problem& p, int64_t position, const Softmax& softmax, const float* weights, const Query& query) {
    const int64_t n = p.num_negatives;
    if (loss != nullptr) loss[position] = softmax.loss();
    if (inverse_queries != nullptr) inverse_queries[position] = query.inverse;
    if (probabilities != nullptr) {
      float* to = probabilities + position * (n + 1);
      std::memcpy(to, weights, static_cast<size_t>(n) * sizeof(float));
      to[n] = softmax.own_probability();
    }
    if (unit_gradients != nullptr) {
      std::memcpy(unit_gradients + position * p.width, query.gradient, static_cast<size_t>(p.width) * sizeof(float));
    }
  }
};

// Scratch of one position: values per negative, padded to whole vectors.
template <class Number>
struct PositionScratch {
  const Number** rows;
  float *scales, *offsets, *weights, *scaled, *tops;
  Query query;

  void layout(Arena& arena, int64_t negatives, int64_t width) {
    const int64_t padded = round_up(negatives, kLanes);
    rows = arena.take<const Number*>(padded + kAhead * kLanes);
    scales = arena.take<float>(padded);
    offsets = arena.take<float>(padded);
    weights = arena.take<float>(padded);
    scaled = arena.take<float>(padded);
    tops = arena.take<float>(ceil_div(padded, kSegment));
    query.scaled = arena.take<float>(round_up(width, kLanes));
    query.gradient = arena.take<float>(round_up(width, kLanes));
  }
};

// Finds the rows of the negatives, and the factors and offsets that turn their products with the query into logits.
template <class Number>
void find_negatives(const Problem& p, const Table<Number>& table, int64_t position,
                    const PositionScratch<Number>& scratch) {
  const int64_t n = p.num_negatives, padded = round_up(n, kLanes);
  const int32_t positive = p.positives[position];
  const int32_t* negatives = p.negatives_of(position);
  const Number** rows = scratch.rows;
  for (int64_t j = 0; j < n; ++j) rows[j] = table.rows + negatives[j] * table.width;
  for (int64_t j = 0; j < n; ++j) scratch.offsets[j] = negatives[j] == positive ? -INFINITY : 0.0f;
  if (p.log_q != nullptr) {
    for (int64_t j = 0; j < n; ++j) scratch.offsets[j] -= p.log_q[negatives[j]];
  }
  if (table.scales != nullptr) {
    for (int64_t j = 0; j < n; ++j) scratch.scales[j] = table.scales[negatives[j]];
  }
  // Padding reads a row of this position: a NaN in any other row must not reach it.
  for (int64_t j = n; j < padded + kAhead * kLanes; ++j) rows[j] = n > 0 ? rows[0] : table.rows;
  for (int64_t j = n; j < padded; ++j) {
    scratch.scales[j] = 0.0f;
    scratch.offsets[j] = -INFINITY;
  }
}

// Leaves the probabilities of the negatives in scratch.weights, 0 for accidental hits, and, when `summed`, the gradient
// of the query for a unit gradient of the loss in scratch.query.
template <class Number>
Softmax score_position(const Problem& p, const Table<Number>& table, Score<Number> score, const float* inverse_rows,
                       int64_t position, bool summed, PositionScratch<Number>& scratch) {
  const int64_t n = p.num_negatives, padded = round_up(n, kLanes);
  Softmax softmax = begin_position(p, inverse_rows, position, scratch.query);
  find_negatives(p, table, position, scratch);
  const Number** const rows = scratch.rows;
  float *const weights = scratch.weights, *const scales = scratch.scales;
  const bool scaled = table.scales != nullptr;
  for (int64_t begin = 0; begin < padded; begin += kSegment) {
    const int64_t end = min_of(padded, begin + kSegment);
    vf highest = splat(softmax.top);
    for (int64_t j = begin; j < end; j += kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) fetch_row(rows[j + kAhead * kLanes + i]);
      vf logit = score(scratch.query.scaled, rows + j, table.width);
      if (scaled) logit *= load(scales + j);
      logit += load(scratch.offsets + j);
      store(weights + j, logit);
      highest = max_of(logit, highest);
    }
    const float decay = softmax.add(weights + begin, end - begin, highest);
    scratch.tops[begin / kSegment] = softmax.top;
    if (!summed) continue;
    const float* factors = weights + begin;
    if (scaled) {
      for (int64_t j = begin; j < end; j += kLanes) store(scratch.scaled + j, load(weights + j) * load(scales + j));
      factors = scratch.scaled + begin;
    }
    add_weighted(rows + begin, factors, min_of(end, n) - begin, table.width, decay, scratch.query.gradient);
  }
  finish_weights(softmax, scratch.tops, kSegment, padded, weights);
  if (summed) finish_gradient(p, inverse_rows, position, softmax, scratch.query);
  return softmax;
}

// Negatives of a group that are unpacked together.
constexpr int64_t kPool = kBlock < 64 ? kBlock / kLanes * kLanes : 64;
static_assert(kPool > 0, "a transposed pool must fit a block");

// Scratch of one group: its negatives as floats, also transposed, and per position what PositionScratch has.
struct GroupScratch {
  float *pool, *turned, *offsets, *queries, *gradients, *weights, *tops;
  Softmax* softmaxes;
  Query* parts;
  int32_t* ids;
  int64_t padded, width;

  void layout(Arena& arena, int64_t negatives, int64_t columns, int64_t largest) {
    padded = round_up(negatives, kLanes);
    width = round_up(columns, kLanes);
    pool = arena.take<float>(kPool * width);
    turned = arena.take<float>(width * kBlock);
    offsets = arena.take<float>(padded);
    queries = arena.take<float>(largest * width);
    gradients = arena.take<float>(largest * width);
    weights = arena.take<float>(largest * padded);
    tops = arena.take<float>(largest * ceil_div(padded, kPool));
    softmaxes = arena.take<Softmax>(largest);
    parts = arena.take<Query>(largest);
    ids = arena.take<int32_t>(padded);
  }
};

// c[rows, columns] (+)= a[rows, depth] * b[depth, columns], columns in whole vectors.
template <int Rows>
void multiply(int64_t depth, int64_t columns, const float* a, int64_t lda, const float* b, int64_t ldb, bool added,
              float* c, int64_t ldc) {
  constexpr int kSums = kRegisters == 32 ? 24 : 12;
  constexpr int kWide = Rows * 4 <= kSums ? 4 : kSums / Rows;
  const auto start = [&](int64_t n) { return added ? c + n : nullptr; };
  int64_t n = 0;
  for (; n + kWide * kLanes <= columns; n += kWide * kLanes)
    micro_tile<Rows, kWide, false>(0, depth, a, lda, b + n, ldb, start(n), ldc, c + n, ldc);
  for (; n < columns; n += kLanes) micro_tile<Rows, 1, false>(0, depth, a, lda, b + n, ldb, start(n), ldc, c + n, ldc);
}

TURBOGR_OUTLINE void multiply_all(int64_t rows, int64_t depth, int64_t columns, const float* a, int64_t lda,
                                  const float* b, int64_t ldb, bool added, float* c, int64_t ldc) {
  using Multiply = void (*)(int64_t, int64_t, const float*, int64_t, const float*, int64_t, bool, float*, int64_t);
  static constexpr Multiply kMultiply[] = {multiply<1>, multiply<2>,  multiply<3>,  multiply<4>,
                                           multiply<5>, multiply<6>,  multiply<7>,  multiply<8>,
                                           multiply<9>, multiply<10>, multiply<11>, multiply<12>};
  for (int64_t m = 0; m < rows; m += kTileRows) {
    const int64_t count = min_of(kTileRows, rows - m);
    kMultiply[count - 1](depth, columns, a + m * lda, lda, b, ldb, added, c + m * ldc, ldc);
  }
}

// Unpacks `count` negatives to floats, as they are and transposed; zeros up to whole vectors of them.
template <class Number>
TURBOGR_OUTLINE void unpack(const Table<Number>& table, const int32_t* ids, int64_t count, int64_t ahead,
                            const GroupScratch& scratch) {
  constexpr int64_t kFetch = 8;
  for (int64_t j = 0; j < count; ++j) {
    if (j + kFetch < ahead) fetch_row(table.rows + ids[j + kFetch] * table.width);
    const Number* from = table.rows + ids[j] * table.width;
    const float scale = table.scales != nullptr ? table.scales[ids[j]] : 1.0f;
    float* to = scratch.pool + j * scratch.width;
    for_vectors(table.width, [&](int64_t c, int lanes) { store(to + c, load_some(from + c, lanes) * scale); });
  }
  pack_transposed(scratch.pool, scratch.width, count, scratch.width, 1.0f, scratch.turned);
}

// The same for the positions of a group, into scratch.weights [., padded], softmaxes and parts.
template <class Number>
void score_group(const Problem& p, const Table<Number>& table, const float* inverse_rows, int64_t group, bool summed,
                 const GroupScratch& scratch) {
  const int64_t n = p.num_negatives, padded = scratch.padded, width = scratch.width;
  const int64_t first = p.first(group), members = p.first(group + 1) - first, segments = ceil_div(padded, kPool);
  const int32_t* negatives = p.negatives_of(group);
  for (int64_t i = 0; i < members; ++i) {
    scratch.parts[i] = {scratch.queries + i * width, scratch.gradients + i * width, 1.0f};
    scratch.softmaxes[i] = begin_position(p, inverse_rows, first + i, scratch.parts[i]);
  }
  for (int64_t j = 0; j < padded; ++j) {
    scratch.ids[j] = j < n ? negatives[j] : -1;
    scratch.offsets[j] = j >= n ? -INFINITY : p.log_q != nullptr ? -p.log_q[negatives[j]] : 0.0f;
  }
  for (int64_t begin = 0; begin < n; begin += kPool) {
    const int64_t count = min_of(kPool, n - begin), lanes = round_up(count, kLanes);
    unpack(table, negatives + begin, count, n - begin, scratch);
    multiply_all(members, width, lanes, scratch.queries, width, scratch.turned, kBlock, false, scratch.weights + begin,
                 padded);
    for (int64_t i = 0; i < members; ++i) {
      float* const logits = scratch.weights + i * padded + begin;
      const vi positive = splat(p.positives[first + i]);
      vf highest = splat(scratch.softmaxes[i].top);
      for (int64_t j = 0; j < lanes; j += kLanes) {
        vf logit = load(logits + j) + load(scratch.offsets + begin + j);
        logit = load(scratch.ids + begin + j) == positive ? splat(-INFINITY) : logit;
        store(logits + j, logit);
        highest = max_of(logit, highest);
      }
      const float decay = scratch.softmaxes[i].add(logits, lanes, highest);
      scratch.tops[i * segments + begin / kPool] = scratch.softmaxes[i].top;
      if (!summed || decay == 1.0f) continue;
      float* const gradient = scratch.gradients + i * width;
      for (int64_t c = 0; c < width; c += kLanes) store(gradient + c, load(gradient + c) * decay);
    }
    if (summed) {
      multiply_all(members, count, width, scratch.weights + begin, padded, scratch.pool, width, true, scratch.gradients,
                   width);
    }
  }
  for (int64_t i = 0; i < members; ++i) {
    const Softmax& softmax = scratch.softmaxes[i];
    finish_weights(softmax, scratch.tops + i * segments, kPool, padded, scratch.weights + i * padded);
    if (summed) finish_gradient(p, inverse_rows, first + i, softmax, scratch.parts[i]);
  }
}

template <class Number>
bool forward(const Problem& p, bool copied, float* inverse_rows, Results results) {
  RowCopy<Number> copy(p, copied, inverse_rows);
  if (!copy) return false;
  const Table<Number> table = copy.table();
  const bool summed = results.unit_gradients != nullptr;
  if (p.offsets != nullptr) {
    parallel_blocks(p.num_groups, max_of(1, 16 / p.largest), [&](int64_t begin, int64_t end) {
      const GroupScratch scratch = take_scratch<GroupScratch>(p.num_negatives, p.width, p.largest);
      for (int64_t group = begin; group < end; ++group) {
        score_group(p, table, inverse_rows, group, summed, scratch);
        for (int64_t i = 0; i < p.first(group + 1) - p.first(group); ++i) {
          results.write(p, p.first(group) + i, scratch.softmaxes[i], scratch.weights + i * scratch.padded,
                        scratch.parts[i]);
        }
      }
    });
    return true;
  }
  const Score<Number> score = choose_score<Number>(table.width);
  parallel_blocks(p.num_positions, 16, [&](int64_t begin, int64_t end) {
    auto scratch = take_scratch<PositionScratch<Number>>(p.num_negatives, p.width);
    for (int64_t t = begin; t < end; ++t) {
      const Softmax softmax = score_position(p, table, score, inverse_rows, t, summed, scratch);
      results.write(p, t, softmax, scratch.weights, scratch.query);
    }
  });
  return true;
}

// Results of the forward that the gradient of the rows needs; `probabilities` [T, n + 1] may be null.
struct Kept {
  const float *inverse_rows, *inverse_queries, *probabilities;
};

// Coefficients of a position's query in the gradients of its negatives and, at n, of its positive; `stride` apart.
void write_coefficients(const Problem& p, const Kept& kept, const float* grad_loss, int64_t position,
                        const float* probabilities, float own_probability, int64_t stride, float* own, float* out) {
  const float factor = grad_loss[position] * kept.inverse_queries[position] * p.inverse_temperature;
  if (stride == 1) {
    for_vectors(p.num_negatives, [&](int64_t j, int count) {
      store_some(out + j, load_some(probabilities + j, count) * factor, count);
    });
  } else {
    for (int64_t j = 0; j < p.num_negatives; ++j) out[j * stride] = probabilities[j] * factor;
  }
  *own = (own_probability - 1.0f) * factor;
}

template <class Number>
bool sum_rows(const Problem& p, bool copied, const Kept& kept, const float* grad_loss, float* grad_rows) {
  const int64_t n = p.num_negatives;
  const bool again = kept.probabilities == nullptr, grouped = p.offsets != nullptr;
  Buffer<float> inverse_again(again && p.normalize ? p.num_rows : 1);
  RowSums sums(p.queries, p.width, p.num_rows, p.num_groups, n + p.largest, kPortion, p.offsets, p.largest);
  if (!inverse_again || !sums) return false;
  const auto sum_all = [&](const Table<Number>& table) {
    const Score<Number> score = choose_score<Number>(table.width);
    sums.add_all(
        [&](int64_t group, int64_t j) -> int64_t {
          if (j < n) return p.negatives_of(group)[j];
          const int64_t position = p.first(group) + j - n;
          return p.positives[position < p.first(group + 1) ? position : p.first(group)];
        },
        [&](int64_t group, float* out) {
          const int64_t first = p.first(group), members = p.first(group + 1) - first;
          if (!grouped) {
            const float* probabilities = kept.probabilities + first * (n + 1);
            float own = again ? 0.0f : probabilities[n];
            if (again) {
              auto scratch = take_scratch<PositionScratch<Number>>(n, p.width);
              own = score_position(p, table, score, kept.inverse_rows, first, false, scratch).own_probability();
              probabilities = scratch.weights;
            }
            write_coefficients(p, kept, grad_loss, first, probabilities, own, 1, out + n, out);
            return;
          }
          float* const owns = out + n * p.largest;
          std::memset(owns, 0, static_cast<size_t>(p.largest * p.largest) * sizeof(float));
          GroupScratch scratch{};
          if (again) {
            scratch = take_scratch<GroupScratch>(n, p.width, p.largest);
            score_group(p, table, kept.inverse_rows, group, false, scratch);
          }
          for (int64_t i = 0; i < members; ++i) {
            const float* probabilities =
                again ? scratch.weights + i * scratch.padded : kept.probabilities + (first + i) * (n + 1);
            const float own = again ? scratch.softmaxes[i].own_probability() : probabilities[n];
            write_coefficients(p, kept, grad_loss, first + i, probabilities, own, p.largest, owns + i * p.largest + i,
                               out + i);
          }
        },
        grad_rows,
        [&](int64_t row, float* sum) {
          if (p.normalize) through_norm(p.rows + row * p.width, kept.inverse_rows[row], p.width, sum);
        });
  };
  if (!again) {
    sum_all({});
    return true;
  }
  RowCopy<Number> copy(p, copied, inverse_again.data());
  if (!copy) return false;
  sum_all(copy.table());
  return true;
}

// Calls body with a number of the type that negatives are read in, and whether rows are copied.
template <class Body>
int in_precision(const Problem& p, Body&& body) {
  const bool reused = p.num_rows <= p.num_groups * (p.num_negatives + 1) / kWorthCopying;
  const bool done = p.precision == kHalf   ? body(Half{}, true)
                    : p.precision == kInt8 ? body(int8_t{}, true)
                                           : body(0.0f, reused);
  return done ? kOk : kOutOfMemory;
}

}  // namespace

// `probabilities` [T, n + 1] and `unit_gradients` [T, width] may be null if no gradient is needed, the former also
// to save memory. Without `normalize` the inverse norms of rows are neither read nor written.
TURBOGR_KERNEL(sampled_softmax_forward)
(const float* queries, const float* rows, const int32_t* positives, const int32_t* negatives, const float* log_q,
 const int64_t* offsets, float* loss, float* inverse_queries, float* inverse_rows, float* probabilities,
 float* unit_gradients, int64_t num_positions, int64_t num_groups, int64_t largest, int64_t num_negatives,
 int64_t num_rows, int64_t width, float inverse_temperature, int64_t normalize, int64_t precision) {
  const Problem p{queries,  rows,          positives,           negatives,      log_q,
                  offsets,  num_positions, num_groups,          largest,        num_negatives,
                  num_rows, width,         inverse_temperature, normalize != 0, static_cast<Precision>(precision)};
  return in_precision(p, [&](auto number, bool copied) {
    return forward<decltype(number)>(p, copied, inverse_rows, {loss, inverse_queries, probabilities, unit_gradients});
  });
}

// Null `probabilities` are computed again. `num_rows` must be below 2^32.
TURBOGR_KERNEL(sampled_softmax_backward)
(const float* grad_loss, const float* queries, const float* rows, const int32_t* positives, const int32_t* negatives,
 const float* log_q, const int64_t* offsets, const float* inverse_queries, const float* inverse_rows,
 const float* probabilities, const float* unit_gradients, float* grad_queries, float* grad_rows, int64_t num_positions,
 int64_t num_groups, int64_t largest, int64_t num_negatives, int64_t num_rows, int64_t width, float inverse_temperature,
 int64_t normalize, int64_t precision) {
  const Problem p{queries,  rows,          positives,           negatives,      log_q,
                  offsets,  num_positions, num_groups,          largest,        num_negatives,
                  num_rows, width,         inverse_temperature, normalize != 0, static_cast<Precision>(precision)};
  parallel_blocks(num_positions, rows_per_block(2 * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for_vectors(width, [&](int64_t c, int count) {
        store_some(grad_queries + t * width + c, load_some(unit_gradients + t * width + c, count) * grad_loss[t],
                   count);
      });
    }
  });
  const Kept kept{inverse_rows, inverse_queries, probabilities};
  return in_precision(
      p, [&](auto number, bool copied) { return sum_rows<decltype(number)>(p, copied, kept, grad_loss, grad_rows); });
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
