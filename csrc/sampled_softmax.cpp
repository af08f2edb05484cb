// Sampled softmax: the loss of every position against its own negatives, and its gradients.
//
// Forward, one position at a time: candidates are taken in segments that fit the first-level cache, scored, and, when a
// gradient will be wanted, summed with their weights while they are there; a segment with a higher logit than all
// before it scales down what has been summed so far. The sum is the gradient of the query for a unit gradient of the
// loss, so the backward never gathers candidates again. Candidate `num_negatives` is the positive.
//
// Where rows are used many times over, scoring reads a copy of them: unit vectors, padded to whole vectors.
//
// Backward to the rows: see row_sums.h. Positions are taken in portions, so the terms of the sums, and the
// probabilities if the forward did not keep them, stay within a fixed budget.

#include <cmath>

#include "row_sums.h"
#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

constexpr float kNormEps = 1e-6f;
constexpr int64_t kPortion = int64_t(1) << 18;  // pairs of a position and a candidate dealt out together
constexpr int64_t kWorthCopying = 4;            // uses of the average row from which a copy of all rows pays

struct Problem {
  const float *queries, *rows;
  const int32_t *positives, *negatives;
  const float* log_q;  // may be null
  int64_t num_positions, num_negatives, num_rows, width;
  float inverse_temperature;
  bool normalize;

  int64_t candidate(int64_t position, int64_t j) const {
    return j < num_negatives ? negatives[position * num_negatives + j] : positives[position];
  }
};

float dot(const float* a, const float* b, int64_t n) {
  vf total{};
  for_vectors(n, [&](int64_t c, int count) { total += load_some(a + c, count) * load_some(b + c, count); });
  return sum(total);
}

float inverse_norm(const float* x, int64_t n) {
  const float norm = std::sqrt(dot(x, x, n));
  return 1.0f / (norm < kNormEps ? kNormEps : norm);
}

// Gradient of the unit vector -> gradient of the vector, in place. A vector shorter than the epsilon was only scaled.
void through_norm(const float* x, float inverse, int64_t n, float* gradient) {
  const bool projected = inverse < 1.0f / kNormEps;
  const float along = projected ? dot(x, gradient, n) * inverse * inverse : 0.0f;
  for_vectors(n, [&](int64_t c, int count) {
    store_some(gradient + c, (load_some(gradient + c, count) - load_some(x + c, count) * along) * inverse, count);
  });
}

// Rows as scoring reads them. A copy holds unit vectors in whole vectors of lanes, zeros after the end, and needs no
// scales; else these are the caller's rows, with their inverse norms if they are to be normalised.
struct Table {
  const float* rows;
  int64_t width;
  const float* scales;  // may be null
};

// Fills the inverse norms, if wanted, and `copy` [num_rows, width in whole vectors], which may be null.
Table make_table(const Problem& p, float* inverse_rows, float* copy) {
  const int64_t width = copy != nullptr ? round_up(p.width, kLanes) : p.width;
  if (copy != nullptr || p.normalize) {
    parallel_blocks(p.num_rows, rows_per_block(2 * width * 4), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* from = p.rows + row * p.width;
        const float inverse = p.normalize ? inverse_norm(from, p.width) : 1.0f;
        if (p.normalize) inverse_rows[row] = inverse;
        if (copy == nullptr) continue;
        float* to = copy + row * width;
        for_vectors(p.width, [&](int64_t c, int count) { store(to + c, load_some(from + c, count) * inverse); });
      }
    });
  }
  if (copy != nullptr) return {copy, width, nullptr};
  return {p.rows, width, p.normalize ? inverse_rows : nullptr};
}

// Lane i of the result is the sum of the lanes of x[i].
vf sum_each(const vf* x) {
#if defined(__AVX2__)
  constexpr int kParts = kLanes / 8;
  __m256 part[kParts];
  for (int p = 0; p < kParts; ++p) {
    __m256 y[8];
    for (int i = 0; i < 8; ++i) {
#if defined(__AVX512F__)
      const __m512 wide = (__m512)x[p * 8 + i];
      y[i] = _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
#else
      y[i] = (__m256)x[i];
#endif
    }
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
    part[p] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
#if defined(__AVX512F__)
  return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(part[0]), part[1], 1);
#else
  return (vf)part[0];
#endif
#else
  vf y;
  for (int i = 0; i < kLanes; ++i) y[i] = sum(x[i]);
  return y;
#endif
}

constexpr int64_t kSegment = 32;  // candidates
static_assert(kSegment % kLanes == 0, "segments must hold whole vectors");

// Groups of kLanes candidates that are fetched ahead of the one being scored.
constexpr int kAhead = 2;

// The first lines of kLanes rows; the processor fetches the rest of a longer row by itself.
inline void fetch(const float* const* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    __builtin_prefetch(rows[i]);
    __builtin_prefetch(rows[i] + 16);
    __builtin_prefetch(rows[i] + 32);
    __builtin_prefetch(rows[i] + 48);
  }
}

// Dot products of the query with kLanes rows of Vectors whole vectors.
template <int Vectors>
vf score_whole(const float* query, const float* const* rows, int64_t) {
  vf total[kLanes] = {};
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) {
    const vf q = load(query + c * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) total[i] += q * load(rows[i] + c * kLanes);
  }
  return sum_each(total);
}

// Dot products of the query with kLanes rows of any width.
vf score_any(const float* query, const float* const* rows, int64_t width) {
  vf total[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    const vf q = load(query + c);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) total[i] += q * load(rows[i] + c);
  }
  if (c < width) {
    const int count = static_cast<int>(width - c);
    const vf q = load_first(query + c, count);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) total[i] += q * load_first(rows[i] + c, count);
  }
  return sum_each(total);
}

using Score = vf (*)(const float*, const float* const*, int64_t);

Score choose_score(int64_t width) {
  static constexpr Score kWhole[] = {score_whole<1>, score_whole<2>, score_whole<3>, score_whole<4>,
                                     score_whole<5>, score_whole<6>, score_whole<7>, score_whole<8>};
  const bool whole = width % kLanes == 0 && width <= 8 * kLanes;
  return whole ? kWhole[width / kLanes - 1] : score_any;
}

// out[column ...] = decay * out[column ...] + sum_j weights[j] * rows[j][column ...] over Vectors vectors, the last of
// `last` columns. `out` has room for whole vectors.
template <int Vectors>
void add_columns(const float* const* rows, const float* weights, int64_t n, int64_t column, int last, float decay,
                 float* out) {
  vf total[Vectors];
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) total[v] = load(out + column + v * kLanes) * decay;
  for (int64_t j = 0; j < n; ++j) {
    const float* row = rows[j] + column;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors - 1; ++v) total[v] += weights[j] * load(row + v * kLanes);
    total[Vectors - 1] += weights[j] * load_some(row + (Vectors - 1) * kLanes, last);
  }
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) store(out + column + v * kLanes, total[v]);
}

// out = decay * out + sum_j weights[j] * rows[j].
void add_weighted(const float* const* rows, const float* weights, int64_t n, int64_t width, float decay, float* out) {
  using Add = void (*)(const float* const*, const float*, int64_t, int64_t, int, float, float*);
  static constexpr Add kAdds[] = {add_columns<1>, add_columns<2>, add_columns<3>, add_columns<4>,
                                  add_columns<5>, add_columns<6>, add_columns<7>, add_columns<8>};
  for (int64_t column = 0; column < width; column += 8 * kLanes) {
    const int64_t columns = min_of(8 * kLanes, width - column);
    const int64_t vectors = ceil_div(columns, kLanes);
    const int last = static_cast<int>(columns - (vectors - 1) * kLanes);
    kAdds[vectors - 1](rows, weights, n, column, last, decay, out);
  }
}

// Of one position: per candidate, padded to whole vectors, and the query, scaled so that its products are logits.
struct Scratch {
  const float** rows;
  float *scales, *offsets, *weights, *scaled, *tops, *query, *gradient;

  void layout(Arena& arena, int64_t candidates, int64_t width) {
    const int64_t padded = round_up(candidates, kLanes);
    rows = arena.take<const float*>(padded + kAhead * kLanes);
    scales = arena.take<float>(padded);
    offsets = arena.take<float>(padded);
    weights = arena.take<float>(padded);
    scaled = arena.take<float>(padded);
    tops = arena.take<float>(ceil_div(padded, kSegment));
    query = arena.take<float>(round_up(width, kLanes));
    gradient = arena.take<float>(round_up(width, kLanes));
  }
};

struct PositionResult {
  float loss, inverse_norm;
};

// Finds the rows of the candidates, and what their products with the query must be scaled by and offset with.
void find_candidates(const Problem& p, const Table& table, int64_t position, const Scratch& scratch) {
  const int64_t n = p.num_negatives, candidates = n + 1, padded = round_up(candidates, kLanes);
  const int32_t positive = p.positives[position];
  const int32_t* negatives = p.negatives + position * n;
  const float* first = table.rows;
  const int64_t width = table.width;
  const float** rows = scratch.rows;
  float* offsets = scratch.offsets;
  for (int64_t j = 0; j < n; ++j) rows[j] = first + negatives[j] * width;
  for (int64_t j = 0; j < n; ++j) offsets[j] = negatives[j] == positive ? -INFINITY : 0.0f;
  rows[n] = first + positive * width;
  offsets[n] = 0.0f;
  if (p.log_q != nullptr) {
    for (int64_t j = 0; j < candidates; ++j) offsets[j] -= p.log_q[p.candidate(position, j)];
  }
  if (table.scales != nullptr) {
    for (int64_t j = 0; j < candidates; ++j) scratch.scales[j] = table.scales[p.candidate(position, j)];
  }
  for (int64_t j = candidates; j < padded + kAhead * kLanes; ++j) rows[j] = scratch.query;
  for (int64_t j = candidates; j < padded; ++j) {
    scratch.scales[j] = 0.0f;
    offsets[j] = -INFINITY;
  }
}

// Replaces logits by their exponentials relative to `top` and returns the sum.
float exponentiate(float* logits, int64_t n, float top) {
  vf sums{};
  for (int64_t j = 0; j < n; j += kLanes) {
    const vf logit = load(logits + j) - top;
    const vf e = logit < -80.0f ? vf{} : exp_of(logit) + (logit - logit);  // exp_of loses a NaN, the zero carries it
    store(logits + j, e);
    sums += e;
  }
  return sum(sums);
}

// Leaves the probabilities of the candidates in scratch.weights, 0 for accidental hits, and, when `summed`, the
// gradient of the query for a unit gradient of the loss in scratch.gradient.
PositionResult score_position(const Problem& p, const Table& table, Score score, int64_t position, bool summed,
                              const Scratch& scratch) {
  const int64_t candidates = p.num_negatives + 1, padded = round_up(candidates, kLanes);
  const float* query = p.queries + position * p.width;
  const float inverse = p.normalize ? inverse_norm(query, p.width) : 1.0f;
  const float factor = inverse * p.inverse_temperature;
  for_vectors(p.width, [&](int64_t c, int count) {
    store(scratch.query + c, load_some(query + c, count) * factor);
    store(scratch.gradient + c, vf{});
  });
  find_candidates(p, table, position, scratch);
  const float** const rows = scratch.rows;
  float *const weights = scratch.weights, *const scales = scratch.scales;
  const bool scaled = table.scales != nullptr;
  float top = -INFINITY, total = 0.0f, own = 0.0f;
  for (int64_t begin = 0; begin < padded; begin += kSegment) {
    const int64_t end = min_of(padded, begin + kSegment);
    vf highest = splat(top);
    for (int64_t j = begin; j < end; j += kLanes) {
      fetch(rows + j + kAhead * kLanes);
      vf logit = score(scratch.query, rows + j, table.width);
      if (scaled) logit *= load(scales + j);
      logit += load(scratch.offsets + j);
      store(weights + j, logit);
      highest = max_of(logit, highest);
    }
    if (p.num_negatives < end && p.num_negatives >= begin) own = weights[p.num_negatives];
    const float higher = max_lane(highest);
    const float decay = top == -INFINITY ? 0.0f : std::exp(top - higher);
    const float base = higher == -INFINITY ? 0.0f : higher;  // nothing but accidental hits so far
    total = total * decay + exponentiate(weights + begin, end - begin, base);
    top = higher;
    scratch.tops[begin / kSegment] = base;
    if (!summed) continue;
    const float* factors = weights + begin;
    if (scaled) {
      for (int64_t j = begin; j < end; j += kLanes) store(scratch.scaled + j, load(weights + j) * load(scales + j));
      factors = scratch.scaled + begin;
    }
    add_weighted(rows + begin, factors, min_of(end, candidates) - begin, table.width, decay, scratch.gradient);
  }
  for (int64_t begin = 0; begin < padded; begin += kSegment) {
    const float scale = std::exp(scratch.tops[begin / kSegment] - top) / total;
    for (int64_t j = begin; j < min_of(padded, begin + kSegment); j += kLanes)
      store(weights + j, load(weights + j) * scale);
  }
  if (summed) {
    const float* positive = rows[p.num_negatives];
    const float scale = scaled ? scales[p.num_negatives] : 1.0f;
    for_vectors(p.width, [&](int64_t c, int count) {
      const vf sum = load(scratch.gradient + c) * (1.0f / total) - load_some(positive + c, count) * scale;
      store(scratch.gradient + c, sum * p.inverse_temperature);
    });
    if (p.normalize) through_norm(query, inverse, p.width, scratch.gradient);
  }
  return {top - own + std::log(total), inverse};
}

// What the rows' gradient needs of the forward; `probabilities` [T, n + 1] may be null.
struct Kept {
  const float *inverse_rows, *inverse_queries, *probabilities;
};

bool sum_rows(const Problem& p, const Kept& kept, const float* grad_loss, float* grad_rows) {
  const int64_t candidates = p.num_negatives + 1;
  const Table table{p.rows, p.width, p.normalize ? kept.inverse_rows : nullptr};
  RowSums sums(p.queries, p.width, p.num_rows, p.num_positions, candidates, kPortion);
  if (!sums) return false;
  const auto finish = [&](int64_t row, float* sum) {
    if (p.normalize) through_norm(p.rows + row * p.width, kept.inverse_rows[row], p.width, sum);
  };
  sums.add_all([&](int64_t position, int64_t j) { return p.candidate(position, j); },
               [&](int64_t position, float* coefficients) {
                 const float* probabilities = kept.probabilities + position * candidates;
                 if (kept.probabilities == nullptr) {
                   const Scratch scratch = take_scratch<Scratch>(candidates, table.width);
                   score_position(p, table, score_any, position, false, scratch);
                   probabilities = scratch.weights;
                 }
                 const float factor = grad_loss[position] * kept.inverse_queries[position] * p.inverse_temperature;
                 for_vectors(candidates, [&](int64_t j, int count) {
                   store_some(coefficients + j, load_some(probabilities + j, count) * factor, count);
                 });
                 coefficients[p.num_negatives] -= factor;
               },
               grad_rows, finish);
  return true;
}

}  // namespace

// `probabilities` [T, n + 1] and `unit_gradients` [T, width] may be null, when no gradient will be wanted or, for the
// former, to save the memory. Without `normalize` the inverse norms of rows are neither read nor written.
TURBOGR_KERNEL(sampled_softmax_forward)
(const float* queries, const float* rows, const int32_t* positives, const int32_t* negatives, const float* log_q,
 float* loss, float* inverse_queries, float* inverse_rows, float* probabilities, float* unit_gradients,
 int64_t num_positions, int64_t num_negatives, int64_t num_rows, int64_t width, float inverse_temperature,
 int64_t normalize) {
  const Problem p{queries,       rows,     positives, negatives,           log_q,         num_positions,
                  num_negatives, num_rows, width,     inverse_temperature, normalize != 0};
  const int64_t candidates = num_negatives + 1;
  const bool copied = num_rows <= num_positions * candidates / kWorthCopying;
  Buffer<float> copy(copied ? num_rows * round_up(width, kLanes) : 1);
  const Table table = make_table(p, inverse_rows, copied && copy ? copy.data() : nullptr);
  const Score score = choose_score(table.width);
  parallel_blocks(num_positions, 16, [&](int64_t begin, int64_t end) {
    const Scratch scratch = take_scratch<Scratch>(candidates, table.width);
    for (int64_t t = begin; t < end; ++t) {
      const PositionResult result = score_position(p, table, score, t, unit_gradients != nullptr, scratch);
      loss[t] = result.loss;
      inverse_queries[t] = result.inverse_norm;
      if (probabilities != nullptr) {
        std::memcpy(probabilities + t * candidates, scratch.weights, static_cast<size_t>(candidates) * sizeof(float));
      }
      if (unit_gradients != nullptr) {
        std::memcpy(unit_gradients + t * width, scratch.gradient, static_cast<size_t>(width) * sizeof(float));
      }
    }
  });
  return kOk;
}

// Null `probabilities` are computed again. `num_rows` must be below 2^32.
TURBOGR_KERNEL(sampled_softmax_backward)
(const float* grad_loss, const float* queries, const float* rows, const int32_t* positives, const int32_t* negatives,
 const float* log_q, const float* inverse_queries, const float* inverse_rows, const float* probabilities,
 const float* unit_gradients, float* grad_queries, float* grad_rows, int64_t num_positions, int64_t num_negatives,
 int64_t num_rows, int64_t width, float inverse_temperature, int64_t normalize) {
  const Problem p{queries,       rows,     positives, negatives,           log_q,         num_positions,
                  num_negatives, num_rows, width,     inverse_temperature, normalize != 0};
  parallel_blocks(num_positions, rows_per_block(2 * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for_vectors(width, [&](int64_t c, int count) {
        store_some(grad_queries + t * width + c, load_some(unit_gradients + t * width + c, count) * grad_loss[t],
                   count);
      });
    }
  });
  const Kept kept{inverse_rows, inverse_queries, probabilities};
  return sum_rows(p, kept, grad_loss, grad_rows) ? kOk : kOutOfMemory;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
