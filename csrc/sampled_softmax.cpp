// Sampled softmax: the loss of every position against its own negatives, and its gradients.
//
// Forward, one position at a time: score the candidates, reduce, and, when a gradient will be wanted, sum the
// candidates weighted by their probabilities while they are still in cache. That sum is the gradient of the query for a
// unit gradient of the loss, so the backward never gathers candidates again. Candidate `num_negatives` is the positive.
//
// Backward to the rows: (position, row, coefficient) triples are dealt out to ranges of rows, in the order of
// positions, then each range is summed by one thread. Nothing depends on the number of threads. Positions are taken in
// portions, so the triples, and the probabilities if the forward did not keep them, stay within a fixed budget.

#include <cmath>

#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

constexpr float kNormEps = 1e-6f;
constexpr int64_t kPortion = int64_t(1) << 22;  // pairs of a position and a candidate handled together in the backward

struct Problem {
  const float *queries, *rows;
  const int64_t *positives, *negatives;
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

// Dot products of the query with kLanes rows.
vf score(const float* query, const float* const* rows, int64_t width) {
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

// out[column ...] = sum_j weights[j] * rows[j][column ...] over Vectors vectors, the last of `last` columns.
template <int Vectors>
void sum_columns(const float* const* rows, const float* weights, int64_t n, int64_t column, int last, float* out) {
  vf total[Vectors] = {};
  for (int64_t j = 0; j < n; ++j) {
    const float* row = rows[j] + column;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors - 1; ++v) total[v] += weights[j] * load(row + v * kLanes);
    total[Vectors - 1] += weights[j] * load_some(row + (Vectors - 1) * kLanes, last);
  }
  for (int v = 0; v < Vectors - 1; ++v) store(out + column + v * kLanes, total[v]);
  store_some(out + column + (Vectors - 1) * kLanes, total[Vectors - 1], last);
}

// out = sum_j weights[j] * rows[j].
void weighted_sum(const float* const* rows, const float* weights, int64_t n, int64_t width, float* out) {
  using Sum = void (*)(const float* const*, const float*, int64_t, int64_t, int, float*);
  static constexpr Sum kSums[] = {sum_columns<1>, sum_columns<2>, sum_columns<3>, sum_columns<4>,
                                  sum_columns<5>, sum_columns<6>, sum_columns<7>, sum_columns<8>};
  for (int64_t column = 0; column < width; column += 8 * kLanes) {
    const int64_t columns = min_of(8 * kLanes, width - column);
    const int64_t vectors = ceil_div(columns, kLanes);
    kSums[vectors - 1](rows, weights, n, column, static_cast<int>(columns - (vectors - 1) * kLanes), out);
  }
}

// Per candidate of one position, padded to whole vectors.
struct Scratch {
  const float** rows;
  float *scales, *offsets, *logits;

  void layout(Arena& arena, int64_t candidates) {
    const int64_t padded = round_up(candidates, kLanes);
    rows = arena.take<const float*>(padded);
    scales = arena.take<float>(padded);
    offsets = arena.take<float>(padded);
    logits = arena.take<float>(padded);
  }
};

struct PositionResult {
  float loss, inverse_norm;
};

// Leaves the probabilities of the candidates in scratch.logits, 0 for accidental hits.
PositionResult score_position(const Problem& p, const float* inverse_rows, int64_t position, const Scratch& scratch) {
  const int64_t candidates = p.num_negatives + 1, padded = round_up(candidates, kLanes);
  const float* query = p.queries + position * p.width;
  const int64_t positive = p.positives[position];
  const float inverse = p.normalize ? inverse_norm(query, p.width) : 1.0f;
  const float factor = inverse * p.inverse_temperature;
  constexpr float kHidden = -INFINITY;
  for (int64_t j = 0; j < candidates; ++j) {
    const int64_t row = p.candidate(position, j);
    scratch.rows[j] = p.rows + row * p.width;
    __builtin_prefetch(scratch.rows[j]);
    scratch.scales[j] = p.normalize ? inverse_rows[row] * factor : factor;
    const bool hit = j < p.num_negatives && row == positive;
    scratch.offsets[j] = hit ? kHidden : p.log_q != nullptr ? -p.log_q[row] : 0.0f;
  }
  for (int64_t j = candidates; j < padded; ++j) {
    scratch.rows[j] = query;
    scratch.scales[j] = 0.0f;
    scratch.offsets[j] = kHidden;
  }
  vf highest = splat(kHidden);
  for (int64_t j = 0; j < padded; j += kLanes) {
    const vf logit = score(query, scratch.rows + j, p.width) * load(scratch.scales + j) + load(scratch.offsets + j);
    store(scratch.logits + j, logit);
    highest = max_of(logit, highest);
  }
  const float top = max_lane(highest), own = scratch.logits[p.num_negatives];
  vf total{};
  for (int64_t j = 0; j < padded; j += kLanes) {
    const vf logit = load(scratch.logits + j) - top;
    const vf e = logit < -80.0f ? vf{} : exp_of(logit) + (logit - logit);  // exp_of loses a NaN, the zero carries it
    store(scratch.logits + j, e);
    total += e;
  }
  const float all = sum(total);
  for (int64_t j = 0; j < padded; j += kLanes) store(scratch.logits + j, load(scratch.logits + j) * (1.0f / all));
  return {top - own + std::log(all), inverse};
}

struct Triple {
  uint32_t position;
  uint32_t row;
  float coefficient;
};

// sums[row] += coefficient * queries[position] for every triple, over Vectors vectors of columns, the last of `last`
// columns. Triples come in the order of positions, so a query is loaded once for its run of them.
template <int Vectors>
void add_columns(const Triple* triples, int64_t n, const float* queries, int64_t width, int last, float* sums) {
  vf query[Vectors] = {};
  uint32_t loaded = UINT32_MAX;
  for (int64_t i = 0; i < n; ++i) {
    const Triple triple = triples[i];
    if (i + 8 < n) {
      __builtin_prefetch(queries + int64_t(triples[i + 8].position) * width);
      __builtin_prefetch(sums + int64_t(triples[i + 8].row) * width, 1);
    }
    if (triple.position != loaded) {
      loaded = triple.position;
      const float* from = queries + int64_t(loaded) * width;
#pragma GCC unroll 8
      for (int v = 0; v < Vectors - 1; ++v) query[v] = load(from + v * kLanes);
      query[Vectors - 1] = load_some(from + (Vectors - 1) * kLanes, last);
    }
    float* sum = sums + int64_t(triple.row) * width;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors - 1; ++v) {
      store(sum + v * kLanes, load(sum + v * kLanes) + triple.coefficient * query[v]);
    }
    float* end = sum + (Vectors - 1) * kLanes;
    store_some(end, load_some(end, last) + triple.coefficient * query[Vectors - 1], last);
  }
}

void add_triples(const Triple* triples, int64_t n, const float* queries, int64_t width, float* sums) {
  using Add = void (*)(const Triple*, int64_t, const float*, int64_t, int, float*);
  static constexpr Add kAdds[] = {add_columns<1>, add_columns<2>, add_columns<3>, add_columns<4>,
                                  add_columns<5>, add_columns<6>, add_columns<7>, add_columns<8>};
  for (int64_t column = 0; column < width; column += 8 * kLanes) {
    const int64_t columns = min_of(8 * kLanes, width - column);
    const int64_t vectors = ceil_div(columns, kLanes);
    const int last = static_cast<int>(columns - (vectors - 1) * kLanes);
    kAdds[vectors - 1](triples, n, queries + column, width, last, sums + column);
  }
}

// Sums of coefficient * query by row, a range of rows at a time.
class RowSums {
 public:
  RowSums(const Problem& problem, const float* inverse_rows, float* target)
      : p_(problem), inverse_rows_(inverse_rows), target_(target) {
    // The sums of a range stay in the first-level cache, unless that makes too many ranges to deal out to.
    while ((int64_t(2) << shift_) * p_.width * 4 <= 32768 || (p_.num_rows >> shift_) >= 1024) ++shift_;
    ranges_ = (p_.num_rows >> shift_) + 1;
  }

  int64_t ranges() const { return ranges_; }
  int64_t range_of(int64_t row) const { return row >> shift_; }

  // Adds the triples of one range; the first portion clears the range, the last finishes it.
  void add(int64_t range, const Triple* triples, int64_t n, int64_t first_position, bool first, bool last) const {
    const int64_t begin = range << shift_, end = min_of(p_.num_rows, (range + 1) << shift_);
    if (begin >= end) return;
    if (first)
      std::memset(target_ + begin * p_.width, 0, static_cast<size_t>((end - begin) * p_.width) * sizeof(float));
    add_triples(triples, n, p_.queries + first_position * p_.width, p_.width, target_);
    if (last && p_.normalize) {
      for (int64_t row = begin; row < end; ++row) {
        through_norm(p_.rows + row * p_.width, inverse_rows_[row], p_.width, target_ + row * p_.width);
      }
    }
  }

 private:
  const Problem& p_;
  const float* inverse_rows_;
  float* target_;
  int shift_ = 0;
  int64_t ranges_;
};

// What the rows' gradient needs of the forward; `probabilities` [T, n + 1] may be null.
struct Kept {
  const float *inverse_rows, *inverse_queries, *probabilities;
};

// The triples of positions [first, end), dealt out by range: `starts` [ranges + 1] tells where each range begins.
void deal_triples(const Problem& p, const Kept& kept, const float* grad_loss, const RowSums& sums, int64_t first,
                  int64_t end, Triple* triples, uint32_t* next, uint32_t* starts) {
  constexpr int64_t kChunk = 64;  // positions of a task
  const int64_t candidates = p.num_negatives + 1, ranges = sums.ranges(), chunks = ceil_div(end - first, kChunk);
  parallel_tasks(chunks, [&](int64_t chunk) {
    uint32_t* count = next + chunk * ranges;
    std::memset(count, 0, static_cast<size_t>(ranges) * sizeof(uint32_t));
    for (int64_t t = first + chunk * kChunk; t < min_of(end, first + (chunk + 1) * kChunk); ++t) {
      for (int64_t j = 0; j < candidates; ++j) ++count[sums.range_of(p.candidate(t, j))];
    }
  });
  uint32_t total = 0;
  for (int64_t range = 0; range < ranges; ++range) {
    starts[range] = total;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t count = next[chunk * ranges + range];
      next[chunk * ranges + range] = total;
      total += count;
    }
  }
  starts[ranges] = total;
  parallel_tasks(chunks, [&](int64_t chunk) {
    const Scratch scratch = take_scratch<Scratch>(candidates);
    uint32_t* at = next + chunk * ranges;
    for (int64_t t = first + chunk * kChunk; t < min_of(end, first + (chunk + 1) * kChunk); ++t) {
      if (kept.probabilities == nullptr) score_position(p, kept.inverse_rows, t, scratch);
      const float* probability = kept.probabilities != nullptr ? kept.probabilities + t * candidates : scratch.logits;
      const float factor = grad_loss[t] * kept.inverse_queries[t] * p.inverse_temperature;
      for (int64_t j = 0; j < candidates; ++j) {
        const int64_t row = p.candidate(t, j);
        const float weight = probability[j] - (j == p.num_negatives ? 1.0f : 0.0f);
        triples[at[sums.range_of(row)]++] = {static_cast<uint32_t>(t - first), static_cast<uint32_t>(row),
                                             weight * factor};
      }
    }
  });
}

bool sum_rows(const Problem& p, const Kept& kept, const float* grad_loss, float* grad_rows) {
  const int64_t candidates = p.num_negatives + 1;
  const int64_t per_portion = max_of(1, min_of(p.num_positions, kPortion / candidates));
  const RowSums sums(p, kept.inverse_rows, grad_rows);
  Buffer<Triple> triples(per_portion * candidates);
  Buffer<uint32_t> next(ceil_div(per_portion, 64) * sums.ranges());
  Buffer<uint32_t> starts(sums.ranges() + 1);
  if (!triples || !next || !starts) return false;
  for (int64_t first = 0; first < max_of(1, p.num_positions); first += per_portion) {
    const int64_t end = min_of(p.num_positions, first + per_portion);
    deal_triples(p, kept, grad_loss, sums, first, end, triples.data(), next.data(), starts.data());
    parallel_tasks(sums.ranges(), [&](int64_t range) {
      sums.add(range, triples.data() + starts[range], starts[range + 1] - starts[range], first, first == 0,
               end == p.num_positions);
    });
  }
  return true;
}

}  // namespace

// `probabilities` [T, n + 1] and `unit_gradients` [T, width] may be null, when no gradient will be wanted or, for the
// former, to save the memory. Without `normalize` the inverse norms of rows are neither read nor written.
TURBOGR_KERNEL(sampled_softmax_forward)
(const float* queries, const float* rows, const int64_t* positives, const int64_t* negatives, const float* log_q,
 float* loss, float* inverse_queries, float* inverse_rows, float* probabilities, float* unit_gradients,
 int64_t num_positions, int64_t num_negatives, int64_t num_rows, int64_t width, float inverse_temperature,
 int64_t normalize) {
  const Problem p{queries,       rows,     positives, negatives,           log_q,         num_positions,
                  num_negatives, num_rows, width,     inverse_temperature, normalize != 0};
  if (p.normalize) {
    parallel_blocks(num_rows, rows_per_block(width * 4), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) inverse_rows[row] = inverse_norm(rows + row * width, width);
    });
  }
  const int64_t candidates = num_negatives + 1;
  parallel_blocks(num_positions, 16, [&](int64_t begin, int64_t end) {
    const Scratch scratch = take_scratch<Scratch>(candidates);
    for (int64_t t = begin; t < end; ++t) {
      const PositionResult result = score_position(p, inverse_rows, t, scratch);
      loss[t] = result.loss;
      inverse_queries[t] = result.inverse_norm;
      if (probabilities != nullptr) {
        std::memcpy(probabilities + t * candidates, scratch.logits, static_cast<size_t>(candidates) * sizeof(float));
      }
      if (unit_gradients == nullptr) continue;
      scratch.logits[num_negatives] -= 1.0f;
      const float to_scale = 1.0f / result.inverse_norm;  // scales[j] holds this, the temperature and the row's norm
      for (int64_t j = 0; j < candidates; ++j) scratch.logits[j] *= scratch.scales[j] * to_scale;
      float* gradient = unit_gradients + t * width;
      weighted_sum(scratch.rows, scratch.logits, candidates, width, gradient);
      if (p.normalize) through_norm(queries + t * width, result.inverse_norm, width, gradient);
    }
  });
  return kOk;
}

// Null `probabilities` are computed again. `num_rows` must be below 2^32.
TURBOGR_KERNEL(sampled_softmax_backward)
(const float* grad_loss, const float* queries, const float* rows, const int64_t* positives, const int64_t* negatives,
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
