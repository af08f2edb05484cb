// embed: look-up, scale, position and dropout in one pass; its backward sums the tokens of each row in a fixed order.

#include "grouping.h"
#include "random.h"
#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

// How many tokens ahead of its use a row is prefetched: rows are scattered in memory, and a cache miss takes long.
constexpr int64_t kAhead = 4;

inline void prefetch_row(const float* row, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t c = 0; c < width; c += kLine) __builtin_prefetch(row + c);
}

// target[row] = factor * sum of dropout(grad)[token] over the tokens of the row, for every row.
bool sum_tokens_by_row(const float* grad, const int64_t* index, int64_t num_tokens, int64_t width, float factor,
                       RowDropout dropout, const int64_t* keys, int64_t num_rows, float* target) {
  Buffer<uint32_t> starts(num_rows + 1);
  Buffer<uint32_t> order(num_tokens);
  if (!starts || !order) return false;
  if (!group_by_row(num_tokens, num_rows, [=](int64_t i) { return index[i]; }, starts.data(), order.data())) {
    return false;
  }
  parallel_blocks(num_rows, 32, [&](int64_t begin, int64_t end) {
    RowDropout local = dropout;
    for (int64_t row = begin; row < end; ++row) {
      float* sum = target + row * width;
      std::memset(sum, 0, static_cast<size_t>(width) * sizeof(float));
      for (uint32_t at = starts[row]; at < starts[row + 1]; ++at) {
        const int64_t token = order[at];
        if (at + kAhead < starts[end]) prefetch_row(grad + order[at + kAhead] * width, width);
        const float* g = grad + token * width;
        local.start_row(keys, token);
        for_vectors(width, [&](int64_t c, int count) {
          const vf term = load_some(g + c, count) * local.factors(c) * factor;
          store_some(sum + c, load_some(sum + c, count) + term, count);
        });
      }
    }
  });
  return true;
}

}  // namespace

TURBOGR_KERNEL(embed_forward)
(const float* rows, const int64_t* index, const float* position_rows, const int64_t* positions, const int64_t* keys,
 float* out, int64_t num_tokens, int64_t width, float scale, uint64_t seed, int64_t threshold, float dropout_scale) {
  parallel_blocks(num_tokens, rows_per_block(3 * width * 4), [&](int64_t begin, int64_t end) {
    RowDropout dropout(seed, threshold, dropout_scale);
    for (int64_t token = begin; token < end; ++token) {
      if (token + kAhead < num_tokens) prefetch_row(rows + index[token + kAhead] * width, width);
      const float* row = rows + index[token] * width;
      const float* position = position_rows + positions[token] * width;
      float* y = out + token * width;
      dropout.start_row(keys, token);
      for_vectors(width, [&](int64_t c, int count) {
        const vf sum = load_some(row + c, count) * scale + load_some(position + c, count);
        store_some(y + c, sum * dropout.factors(c), count);
      });
    }
  });
  return kOk;
}

// A null gradient pointer means that it is not needed.
TURBOGR_KERNEL(embed_backward)
(const float* grad, const int64_t* index, const int64_t* positions, const int64_t* keys, float* grad_rows,
 float* grad_position_rows, int64_t num_tokens, int64_t width, int64_t num_rows, int64_t num_positions, float scale,
 uint64_t seed, int64_t threshold, float dropout_scale) {
  const RowDropout dropout(seed, threshold, dropout_scale);
  if (grad_rows != nullptr &&
      !sum_tokens_by_row(grad, index, num_tokens, width, scale, dropout, keys, num_rows, grad_rows)) {
    return kOutOfMemory;
  }
  if (grad_position_rows != nullptr &&
      !sum_tokens_by_row(grad, positions, num_tokens, width, 1.0f, dropout, keys, num_positions, grad_position_rows)) {
    return kOutOfMemory;
  }
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
