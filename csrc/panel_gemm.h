// Products with a weight that stays in the second-level cache, for rows that lie in scratch memory.
//
// The weight is packed into panels as wide as a micro-tile, the last padded with zeros. Rows of scratch are an odd
// number of cache lines apart: with a power of two, the rows of a micro-tile would compete for the same few cache sets.
#pragma once

#include "tile_gemm.h"

namespace turbogr {
namespace TURBOGR_ISA {

// Rows of a block: so few that the operands of a product stay in cache together with the weight.
constexpr int64_t kPanelRows = 96;
static_assert(kPanelRows % kTileRows == 0, "blocks must hold whole micro-tiles");

// Floats from one row of scratch to the next.
inline int64_t scratch_stride(int64_t width) {
  const int64_t lines = ceil_div(width, 16);
  return 16 * (lines + 1 - lines % 2);
}

// Scratch for a block, with room for a micro-tile that reads beyond the last column.
inline float* take_rows(Arena& arena, int64_t width) {
  return arena.take<float>(kPanelRows * scratch_stride(width) + kTileRows);
}

// A block of rows before a product and after it.
struct ForwardScratch {
  float *left, *product;
  void layout(Arena& arena, int64_t width, int64_t columns) {
    left = take_rows(arena, width);
    product = take_rows(arena, columns);
  }
};

// A weight [depth, columns] in panels.
class Panels {
 public:
  // Element (k, n) stands at weight[k * row_stride + n * column_stride]. Test the object before use.
  Panels(const float* weight, int64_t depth, int64_t columns, int64_t row_stride, int64_t column_stride)
      : depth_(depth),
        columns_(columns),
        rest_(columns % kLanes * (depth / kLanes + kCostOfSum) < depth ? columns % kLanes : 0),
        padded_(round_up(columns - rest_, kLanes)),
        data_(depth * (padded_ + rest_)) {
    if (!data_) return;
    for (int64_t n = 0; n < padded_; n += kTileColumns) {
      const int64_t wide = min_of(kTileColumns, padded_ - n), filled = min_of(wide, columns - n);
      float* to = data_.data() + n * depth;
      for (int64_t k = 0; k < depth; ++k, to += wide) {
        const float* from = weight + k * row_stride + n * column_stride;
        for (int64_t j = 0; j < filled; ++j) to[j] = from[j * column_stride];
        for (int64_t j = filled; j < wide; ++j) to[j] = 0.0f;
      }
    }
    for (int64_t n = padded_; n < padded_ + rest_; ++n) {
      for (int64_t k = 0; k < depth; ++k) data_[n * depth + k] = weight[k * row_stride + n * column_stride];
    }
  }
  explicit operator bool() const { return bool(data_); }

  // out [rows, columns] = left [rows, depth] times the weight, both in scratch of take_rows.
  TURBOGR_OUTLINE void multiply(const float* left, int64_t rows, float* out) const {
    const int64_t left_stride = scratch_stride(depth_), out_stride = scratch_stride(columns_);
    for (int64_t m = 0; m < rows; m += kTileRows) {
      const float* a = left + m * left_stride;
      for (int64_t n = 0; n < padded_; n += kTileColumns) {
        const float* b = &data_[n * depth_];
        float* c = out + m * out_stride + n;
        if (n + kTileColumns <= padded_) {
          micro_tile<kTileRows, kTileVectors, false>(0, depth_, a, left_stride, b, kTileColumns, nullptr, 0, c,
                                                     out_stride);
        } else {
          micro_tile<kTileRows, 1, false>(0, depth_, a, left_stride, b, kLanes, nullptr, 0, c, out_stride);
        }
      }
    }
    for (int64_t m = 0; rest_ > 0 && m < rows; ++m) multiply_rest(left + m * left_stride, out + m * out_stride);
  }

 private:
  // Cost of the sum over the lanes of a vector, in multiplications of vectors.
  static constexpr int64_t kCostOfSum = 12;

  // The last columns, if they would leave most lanes of a vector idle: computed with the depth along the lanes.
  void multiply_rest(const float* left, float* out) const {
    for (int64_t n = padded_; n < columns_; ++n) {
      const float* b = &data_[n * depth_];
      vf total{};
      for_vectors(depth_, [&](int64_t k, int count) { total += load_some(left + k, count) * load_some(b + k, count); });
      out[n] = sum(total);
    }
  }

  int64_t depth_, columns_, rest_, padded_;
  Buffer<float> data_;
};

// The gradients of a weight, left^T right over all rows, and of a bias, the sum of the rows of `right`.
//
// Fixed chunks of rows have sums of their own, which are added up in the order of the chunks, so nothing depends on the
// number of threads. The longer side of the weight is along the lanes, so that fewer are idle.
class WeightGradient {
 public:
  // For left [num_rows, height] and right [num_rows, columns]. Test the object before use.
  WeightGradient(int64_t num_rows, int64_t height, int64_t columns)
      : num_rows_(num_rows),
        height_(height),
        columns_(columns),
        turned_(height > columns),
        stride_(scratch_stride(max_of(height, columns))),
        bias_at_(round_up(min_of(height, columns), kTileRows) * stride_),
        chunk_(round_up(max_of(kChunk, ceil_div(num_rows, kMostChunks)), kPanelRows)),
        sums_(num_chunks() * chunk_floats()) {}
  explicit operator bool() const { return bool(sums_); }

  // Calls body(begin, end) for blocks of at most kPanelRows rows; those of a chunk come in their order, on one thread.
  template <class Body>
  void for_blocks(Body&& body) const {
    parallel_blocks(num_rows_, chunk_, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; at += kPanelRows) body(at, min_of(end, at + kPanelRows));
    });
  }

  // Adds the rows of a block to the sums of its chunk. Both sides are scratch with rows of scratch_stride floats.
  TURBOGR_OUTLINE void add(int64_t begin, int64_t end, const float* left, const float* right) {
    float* const sums = sums_.data() + begin / chunk_ * chunk_floats();
    const bool first = begin % chunk_ == 0;
    const Side of_left{left, scratch_stride(height_), height_}, of_right{right, scratch_stride(columns_), columns_};
    add_product(turned_ ? of_right : of_left, turned_ ? of_left : of_right, end - begin, first, sums);
    float* const bias = sums + bias_at_;
    for (int64_t c = 0; c < columns_; c += kLanes) {
      vf total = first ? vf{} : load(bias + c);
      for (int64_t row = 0; row < end - begin; ++row) total += load(right + row * of_right.stride + c);
      store(bias + c, total);
    }
  }

  // Writes weight [height, columns] and, unless it is null, bias [columns].
  void finish(float* weight, float* bias) const {
    const int64_t lines = turned_ ? columns_ : height_, width = turned_ ? height_ : columns_;
    const int64_t line_step = turned_ ? 1 : columns_, step = turned_ ? columns_ : 1;
    parallel_blocks(lines, kTileRows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) write_total(i * stride_, width, weight + i * line_step, step);
    });
    if (bias != nullptr) write_total(bias_at_, columns_, bias, 1);
  }

 private:
  static constexpr int64_t kChunk = 512, kMostChunks = 64;

  struct Side {
    const float* data;
    int64_t stride, width;
  };

  int64_t num_chunks() const { return ceil_div(num_rows_, chunk_); }
  int64_t chunk_floats() const { return bias_at_ + stride_; }

  // Tiles have the height that leaves the fewest of their rows idle.
  void add_product(const Side& a, const Side& b, int64_t rows, bool first, float* sums) const {
    if (a.width > 0) add_tiles<kTileRows>(ceil_div(a.width, ceil_div(a.width, kTileRows)), a, b, rows, first, sums);
  }

  template <int Rows>
  void add_tiles(int64_t height, const Side& a, const Side& b, int64_t rows, bool first, float* sums) const {
    if constexpr (Rows > 1) {
      if (height < Rows) return add_tiles<Rows - 1>(height, a, b, rows, first, sums);
    }
    for (int64_t n = 0; n < b.width; n += kTileColumns) {
      for (int64_t m = 0; m < a.width; m += Rows) {
        float* to = sums + m * stride_ + n;
        const float* from = first ? nullptr : to;
        if (n + kLanes < b.width) {
          micro_tile<Rows, kTileVectors, true>(0, rows, a.data + m, a.stride, b.data + n, b.stride, from, stride_, to,
                                               stride_);
        } else {
          micro_tile<Rows, 1, true>(0, rows, a.data + m, a.stride, b.data + n, b.stride, from, stride_, to, stride_);
        }
      }
    }
  }

  // to[i * step] = sum over chunks of what they have at `at` + i.
  void write_total(int64_t at, int64_t width, float* to, int64_t step) const {
    for_vectors(width, [&](int64_t c, int count) {
      vf total{};
      for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) total += load(&sums_[chunk * chunk_floats() + at + c]);
      if (step == 1) {
        store_some(to + c, total, count);
      } else {
        for (int i = 0; i < count; ++i) to[(c + i) * step] = total[i];
      }
    });
  }

  int64_t num_rows_, height_, columns_;
  bool turned_;
  int64_t stride_, bias_at_, chunk_;
  Buffer<float> sums_;
};

}  // namespace TURBOGR_ISA
}  // namespace turbogr
