// look_up_rows: the vectors of several features' ids, all from the same rows. Its backward sums the gradients of each
// row's ids in a fixed order, and reads every feature's gradient where it is.

#include "grouping.h"
#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

// How many vectors ahead of its use a vector is prefetched: they are scattered in memory, and a cache miss takes long.
constexpr int64_t kAhead = 4;

inline void prefetch_row(const float* row, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t c = 0; c < width; c += kLine) __builtin_prefetch(row + c);
}

// Ids of all features, numbered through: feature f has the ids starts[f] to starts[f + 1] - 1, and their vectors are
// contiguous from vectors[f] on.
class Features {
 public:
  Features(const float* const* vectors, const int64_t* starts, int64_t width)
      : vectors_(vectors), starts_(starts), width_(width) {}

  // The vector of id i, or null if its feature has none. Quick if i is of the same feature as in the last call.
  const float* vector(int64_t i) {
    while (i >= starts_[feature_ + 1]) ++feature_;
    while (i < starts_[feature_]) --feature_;
    const float* first = vectors_[feature_];
    return first == nullptr ? nullptr : first + (i - starts_[feature_]) * width_;
  }

 private:
  const float* const* vectors_;
  const int64_t* starts_;
  int64_t width_;
  int64_t feature_ = 0;
};

}  // namespace

// outs[f] [starts[f + 1] - starts[f], width] = rows[index[i]] for the ids i of feature f; all ids are spread over the
// threads in equal blocks, whatever feature they are of.
TURBOGR_KERNEL(look_up_forward)
(const float* rows, const int32_t* index, const int64_t* starts, float* const* outs, int64_t num_features,
 int64_t width) {
  const int64_t num_ids = starts[num_features];
  parallel_blocks(num_ids, rows_per_block(2 * width * 4), [&](int64_t block_begin, int64_t block_end) {
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t begin = max_of(block_begin, starts[f]), end = min_of(block_end, starts[f + 1]);
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < num_ids) prefetch_row(rows + index[i + kAhead] * width, width);
        const float* row = rows + index[i] * width;
        float* out = outs[f] + (i - starts[f]) * width;
        for_vectors(width, [&](int64_t c, int count) { store_some(out + c, load_some(row + c, count), count); });
      }
    }
  });
  return kOk;
}

// grad_rows[r] = sum of the gradients of the ids of row r, in their order. A null gradient counts as zeros.
TURBOGR_KERNEL(look_up_backward)
(const float* const* grads, const int32_t* index, const int64_t* starts, float* grad_rows, int64_t num_features,
 int64_t num_rows, int64_t width) {
  const int64_t num_ids = starts[num_features];
  Buffer<uint32_t> row_starts(num_rows + 1);
  Buffer<uint32_t> order(num_ids);
  if (!row_starts || !order) return kOutOfMemory;
  const auto row_of = [=](int64_t i) { return static_cast<int64_t>(index[i]); };
  if (!group_by_row(num_ids, num_rows, row_of, row_starts.data(), order.data())) return kOutOfMemory;
  parallel_blocks(num_rows, 32, [&](int64_t begin, int64_t end) {
    Features current(grads, starts, width), ahead(grads, starts, width);
    for (int64_t row = begin; row < end; ++row) {
      float* sum = grad_rows + row * width;
      std::memset(sum, 0, static_cast<size_t>(width) * sizeof(float));
      for (int64_t at = row_starts[row]; at < row_starts[row + 1]; ++at) {
        if (at + kAhead < row_starts[end]) {
          const float* next = ahead.vector(order[at + kAhead]);
          if (next != nullptr) prefetch_row(next, width);
        }
        const float* grad = current.vector(order[at]);
        if (grad == nullptr) continue;
        for_vectors(width, [&](int64_t c, int count) {
          store_some(sum + c, load_some(sum + c, count) + load_some(grad + c, count), count);
        });
      }
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
