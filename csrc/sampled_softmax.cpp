// sampled_softmax: candidates are gathered, scored and reduced without an array of vectors or of logits.
//
// Of a token t with query q and candidates c (the positive first), logit = q·r_c * s * inv|q| * inv|r_c| - log Q_c. The forward keeps
// per token the logarithm of the sum and the inverse norms; the backward scores again. Its gradient of the rows is
// summed row by row over (token, candidate) pairs that a counting sort brings together, so each row is written once and in a
// fixed order. Pairs are handled in chunks of bounded size.

#include "grouping.h"
#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

constexpr float kNormEps = 1e-6f;
constexpr float kMasked = -1e30f;  // finite, so that 0 * logit tells a NaN from a masked logit
constexpr int64_t kChunkPairs = int64_t{1} << 23;
constexpr int64_t kTaskPairs = 4096;
constexpr int64_t kCacheBytes = 262144;

struct Shape {
  int64_t num_tokens, num_negatives, num_rows, width;
  float inverse_temperature;
};

struct Inputs {
  const float* queries;
  const float* rows;
  const int64_t* positives;
  const int64_t* negatives;
  const float* log_q;         // may be null
  const float* query_scales;  // inverse norms
  const float* row_scales;
};

inline float squared_norm(const float* x, int64_t width) {
  vf total{};
  for_vectors(width, [&](int64_t c, int count) {
    const vf v = load_some(x + c, count);
    total += v * v;
  });
  return sum(total);
}

// 1 / max(norm, eps) of every row of x, or ones.
void inverse_norms(const float* x, int64_t num_rows, int64_t width, bool normalize, float* out) {
  parallel_blocks(num_rows, rows_per_block(4 * width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (!normalize) {
        out[row] = 1.0f;
        continue;
      }
      const float norm = __builtin_sqrtf(squared_norm(x + row * width, width));
      out[row] = 1.0f / (norm < kNormEps ? kNormEps : norm);
    }
  });
}

// The dot products of a query with four rows.
inline void dot4(const float* q, const float* const* r, int64_t width, float* out) {
  vf a{}, b{}, c{}, d{};
  for_vectors(width, [&](int64_t at, int count) {
    const vf x = load_some(q + at, count);
    a += x * load_some(r[0] + at, count);
    b += x * load_some(r[1] + at, count);
    c += x * load_some(r[2] + at, count);
    d += x * load_some(r[3] + at, count);
  });
  out[0] = sum(a);
  out[1] = sum(b);
  out[2] = sum(c);
  out[3] = sum(d);
}

// y += the sum of four rows times their weights.
inline void add4(float* y, const float* const* r, const float* w, int64_t width) {
  for_vectors(width, [&](int64_t at, int count) {
    const vf left = load_some(r[0] + at, count) * w[0] + load_some(r[1] + at, count) * w[1];
    const vf right = load_some(r[2] + at, count) * w[2] + load_some(r[3] + at, count) * w[3];
    store_some(y + at, load_some(y + at, count) + (left + right), count);
  });
}

inline int64_t candidate(const Inputs& in, const Shape& shape, int64_t token, int64_t j) {
  return j == 0 ? in.positives[token] : in.negatives[token * shape.num_negatives + j - 1];
}

// Visits the candidates of a token four at a time: body(j, count, ids, rows), the rows beyond `count` repeating the last.
template <class Body>
inline void for_candidates(const Inputs& in, const Shape& shape, int64_t token, Body&& body) {
  const int64_t total = shape.num_negatives + 1;
  for (int64_t j = 0; j < total; j += 4) {
    const int count = static_cast<int>(min_of(4, total - j));
    int64_t ids[4];
    const float* rows[4];
    for (int i = 0; i < 4; ++i) {
      ids[i] = candidate(in, shape, token, j + (i < count ? i : count - 1));
      rows[i] = in.rows + ids[i] * shape.width;
    }
    for (int64_t ahead = j + 8; ahead < min_of(total, j + 12); ++ahead) {
      __builtin_prefetch(in.rows + candidate(in, shape, token, ahead) * shape.width);
    }
    body(j, count, ids, rows);
  }
}

// Logits of four candidates; a negative that is the positive is masked.
inline void score4(const Inputs& in, const Shape& shape, int64_t token, int64_t j, const int64_t* ids,
                   const float* const* rows, float* logits) {
  dot4(in.queries + token * shape.width, rows, shape.width, logits);
  const float scale = in.query_scales[token] * shape.inverse_temperature;
  for (int i = 0; i < 4; ++i) {
    logits[i] = logits[i] * scale * in.row_scales[ids[i]] - (in.log_q ? in.log_q[ids[i]] : 0.0f);
    if (j + i > 0 && ids[i] == in.positives[token]) logits[i] = kMasked;
  }
}

// log(sum of exp) of n logits; NaN when one is.
float log_sum_exp(const float* logits, int64_t n) {
  float most = logits[0];
  for (int64_t j = 1; j < n; ++j) most = logits[j] > most ? logits[j] : most;
  vf total{};
  for_vectors(n, [&](int64_t j, int count) {
    const vf l = load_some(logits + j, count);
    const vf e = exp_of(l - most) + l * 0.0f;  // exp_of loses a NaN, the product carries it
    total += count == kLanes ? e : (lane_numbers() < count ? e : vf{});
  });
  const float all = sum(total);
  return most + log_of(splat(all))[0] + all * 0.0f;  // log_of loses a NaN as well
}

// The gradient of x from that of x * scale, where scale = 1 / norm unless the norm was too small.
void through_norm(float* grad, const float* x, float scale, int64_t width) {
  if (scale >= 1.0f / kNormEps) {
    for_vectors(width, [&](int64_t c, int count) { store_some(grad + c, load_some(grad + c, count) * scale, count); });
    return;
  }
  vf total{};
  for_vectors(width, [&](int64_t c, int count) { total += load_some(grad + c, count) * load_some(x + c, count); });
  const float along = sum(total) * scale * scale;
  for_vectors(width, [&](int64_t c, int count) {
    store_some(grad + c, (load_some(grad + c, count) - load_some(x + c, count) * along) * scale, count);
  });
}

// Gradients of the queries of tokens [first, last), and per pair its row and its weight on the query.
void query_gradients(const Inputs& in, const Shape& shape, const float* sums, const float* grad_loss, bool normalize,
                     int64_t first, int64_t last, float* grad_queries, uint32_t* pair_rows, float* pair_weights) {
  const int64_t total = shape.num_negatives + 1;
  parallel_blocks(last - first, 16, [&](int64_t begin, int64_t end) {
    for (int64_t token = first + begin; token < first + end; ++token) {
      float* grad = grad_queries + token * shape.width;
      std::memset(grad, 0, static_cast<size_t>(shape.width) * sizeof(float));
      const float query_scale = in.query_scales[token] * shape.inverse_temperature;
      const float upstream = grad_loss[token];
      for_candidates(in, shape, token, [&](int64_t j, int count, const int64_t* ids, const float* const* rows) {
        float logits[kLanes] = {}, weights[4];
        score4(in, shape, token, j, ids, rows, logits);
        const vf p = exp_of(load(logits) - sums[token]);
        const int64_t pair = (token - first) * total + j;
        for (int i = 0; i < 4; ++i) {
          float w = 0.0f;
          if (i < count && logits[i] != kMasked) w = (p[i] + logits[i] * 0.0f - (j + i == 0 ? 1.0f : 0.0f)) * upstream;
          weights[i] = w * in.row_scales[ids[i]] * shape.inverse_temperature;
          if (i < count) {
            pair_rows[pair + i] = static_cast<uint32_t>(ids[i]);
            pair_weights[pair + i] = w * query_scale;
          }
        }
        add4(grad, rows, weights, shape.width);
      });
      if (normalize) through_norm(grad, in.queries + token * shape.width, in.query_scales[token], shape.width);
    }
  });
}

// grad_rows[row] += sum over the row's pairs of weight * query.
void add_row_gradients(const Inputs& in, const Shape& shape, int64_t first_token, const uint32_t* starts,
                       const uint32_t* order, const float* pair_weights, float* grad_rows) {
  const uint32_t total = static_cast<uint32_t>(shape.num_negatives + 1);
  const int64_t num_pairs = starts[shape.num_rows];
  const auto first_row_from = [&](int64_t pair) {  // first row whose pairs start at `pair` or later
    int64_t low = 0, high = shape.num_rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (starts[middle] < pair) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  parallel_tasks(ceil_div(num_pairs, kTaskPairs), [&](int64_t task) {
    const int64_t begin = first_row_from(task * kTaskPairs);
    const int64_t end = first_row_from(min_of(num_pairs, (task + 1) * kTaskPairs));
    for (int64_t row = begin; row < end; ++row) {
      float* grad = grad_rows + row * shape.width;
      for (uint32_t at = starts[row]; at < starts[row + 1]; at += 4) {
        const float* queries[4];
        float weights[4];
        for (uint32_t i = 0; i < 4; ++i) {
          const bool real = at + i < starts[row + 1];
          const uint32_t pair = order[real ? at + i : at];
          queries[i] = in.queries + (first_token + pair / total) * shape.width;
          weights[i] = real ? pair_weights[pair] : 0.0f;
        }
        add4(grad, queries, weights, shape.width);
      }
    }
  });
}

// Tokens per chunk: their queries fit the second-level cache, unless the table is so large that going over its rows would
// weigh more than the pairs; and the pairs' arrays stay bounded.
int64_t chunk_tokens(const Shape& shape) {
  const int64_t total = shape.num_negatives + 1;
  const int64_t wanted = max_of(kCacheBytes / (4 * shape.width), shape.num_rows / total);
  return max_of(1, min_of(shape.num_tokens, min_of(wanted, kChunkPairs / total)));
}

}  // namespace

// `losses` and `sums` (log of the sum of exp) [T], `query_scales` [T], `row_scales` [R].
TURBOGR_KERNEL(sampled_softmax_forward)
(const float* queries, const float* rows, const int64_t* positives, const int64_t* negatives, const float* log_q,
 float* losses, float* sums, float* query_scales, float* row_scales, int64_t num_tokens, int64_t num_negatives,
 int64_t num_rows, int64_t width, float inverse_temperature, int64_t normalize) {
  inverse_norms(queries, num_tokens, width, normalize != 0, query_scales);
  inverse_norms(rows, num_rows, width, normalize != 0, row_scales);
  const Shape shape{num_tokens, num_negatives, num_rows, width, inverse_temperature};
  const Inputs in{queries, rows, positives, negatives, log_q, query_scales, row_scales};
  parallel_blocks(num_tokens, 16, [&](int64_t begin, int64_t end) {
    float* logits = static_cast<float*>(thread_scratch(static_cast<size_t>(num_negatives + 8) * sizeof(float)));
    for (int64_t token = begin; token < end; ++token) {
      for_candidates(in, shape, token, [&](int64_t j, int, const int64_t* ids, const float* const* candidates) {
        score4(in, shape, token, j, ids, candidates, logits + j);
      });
      sums[token] = log_sum_exp(logits, num_negatives + 1);
      losses[token] = sums[token] - logits[0];
    }
  });
  return kOk;
}

TURBOGR_KERNEL(sampled_softmax_backward)
(const float* queries, const float* rows, const int64_t* positives, const int64_t* negatives, const float* log_q,
 const float* sums, const float* query_scales, const float* row_scales, const float* grad_loss, float* grad_queries,
 float* grad_rows, int64_t num_tokens, int64_t num_negatives, int64_t num_rows, int64_t width,
 float inverse_temperature, int64_t normalize) {
  const Shape shape{num_tokens, num_negatives, num_rows, width, inverse_temperature};
  const Inputs in{queries, rows, positives, negatives, log_q, query_scales, row_scales};
  const int64_t total = num_negatives + 1;
  const int64_t chunk = chunk_tokens(shape);
  Buffer<uint32_t> pair_rows(chunk * total), order(chunk * total), starts(num_rows + 1);
  Buffer<float> pair_weights(chunk * total);
  if (!pair_rows || !order || !starts || !pair_weights) return kOutOfMemory;
  std::memset(grad_rows, 0, static_cast<size_t>(num_rows * width) * sizeof(float));
  for (int64_t first = 0; first < num_tokens; first += chunk) {
    const int64_t last = min_of(num_tokens, first + chunk);
    query_gradients(in, shape, sums, grad_loss, normalize != 0, first, last, grad_queries, pair_rows.data(),
                    pair_weights.data());
    const uint32_t* row_of = pair_rows.data();
    if (!group_by_row((last - first) * total, num_rows, [=](int64_t i) { return int64_t{row_of[i]}; }, starts.data(),
                      order.data())) {
      return kOutOfMemory;
    }
    add_row_gradients(in, shape, first, starts.data(), order.data(), pair_weights.data(), grad_rows);
  }
  if (normalize == 0) return kOk;
  parallel_blocks(num_rows, rows_per_block(8 * width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      through_norm(grad_rows + row * width, rows + row * width, row_scales[row], width);
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
