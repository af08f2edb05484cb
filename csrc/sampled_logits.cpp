// Sampled logits: products of every query with its own rows of a table, and their gradients.
//
// Rows are read where they are, kLanes at a time; no [T, n, d] array exists. Backward to the rows: see row_sums.h.

#include "candidates.h"
#include "row_sums.h"
#include "unit_vectors.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

constexpr int64_t kPortion = int64_t(1) << 18;  // pairs of a position and a row whose gradients are added together

// index [num_positions, num_indices] are the rows of each position. Inverse norms are null if vectors are not to be
// scaled to unit length.
struct Problem {
  const float *queries, *rows;
  const int32_t* index;
  const float *inverse_queries, *inverse_rows;
  int64_t num_positions, num_indices, num_rows, width;
  float inverse_temperature;

  const float* query(int64_t position) const { return queries + position * width; }
  const int32_t* index_of(int64_t position) const { return index + position * num_indices; }
  float factor(int64_t position) const {
    return inverse_queries != nullptr ? inverse_queries[position] * inverse_temperature : inverse_temperature;
  }
};

// Scratch of one position: pointers to its rows, their scales, and a vector of the width.
struct Scratch {
  const float** rows;
  float *scales, *vector;

  void layout(Arena& arena, int64_t num_indices, int64_t width) {
    const int64_t padded = round_up(num_indices, kLanes);
    rows = arena.take<const float*>(padded + kAhead * kLanes);
    scales = arena.take<float>(padded);
    vector = arena.take<float>(round_up(width, kLanes));
  }

  // Finds the rows of a position; surplus pointers are to its own rows, so that no other is read.
  void find(const Problem& p, int64_t position) const {
    const int64_t n = p.num_indices, padded = round_up(n, kLanes);
    const int32_t* const index = p.index_of(position);
    for (int64_t j = 0; j < n; ++j) {
      rows[j] = p.rows + index[j] * p.width;
      scales[j] = p.inverse_rows != nullptr ? p.inverse_rows[index[j]] : 1.0f;
    }
    for (int64_t j = n; j < padded + kAhead * kLanes; ++j) rows[j] = rows[0];
    for (int64_t j = n; j < padded; ++j) scales[j] = 0.0f;
  }
};

void score(const Problem& p, int64_t position, Score<float> score_rows, const Scratch& s, float* logits) {
  s.find(p, position);
  const float factor = p.factor(position);
  for_vectors(p.width,
              [&](int64_t c, int count) { store(s.vector + c, load_some(p.query(position) + c, count) * factor); });
  for_vectors(p.num_indices, [&](int64_t j, int count) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) fetch_row(s.rows[j + kAhead * kLanes + i]);
    store_some(logits + j, score_rows(s.vector, s.rows + j, p.width) * load(s.scales + j), count);
  });
}

void differentiate_query(const Problem& p, int64_t position, const float* grad, const Scratch& s, float* out) {
  s.find(p, position);
  for_vectors(p.num_indices,
              [&](int64_t j, int count) { store(s.scales + j, load(s.scales + j) * load_some(grad + j, count)); });
  std::memset(s.vector, 0, static_cast<size_t>(round_up(p.width, kLanes)) * sizeof(float));
  add_weighted(s.rows, s.scales, p.num_indices, p.width, 1.0f, s.vector);
  for (int64_t c = 0; c < p.width; c += kLanes) store(s.vector + c, load(s.vector + c) * p.inverse_temperature);
  if (p.inverse_queries != nullptr) through_norm(p.query(position), p.inverse_queries[position], p.width, s.vector);
  std::memcpy(out, s.vector, static_cast<size_t>(p.width) * sizeof(float));
}

bool differentiate_rows(const Problem& p, const float* grad, float* grad_rows) {
  RowSums sums(p.queries, p.width, p.num_rows, p.num_positions, p.num_indices, kPortion);
  if (!sums) return false;
  sums.add_all([&](int64_t position, int64_t j) -> int64_t { return p.index_of(position)[j]; },
               [&](int64_t position, float* out) {
                 const float factor = p.factor(position);
                 const float* const from = grad + position * p.num_indices;
                 for_vectors(p.num_indices, [&](int64_t j, int count) {
                   store_some(out + j, load_some(from + j, count) * factor, count);
                 });
               },
               grad_rows,
               [&](int64_t row, float* sum) {
                 if (p.inverse_rows != nullptr) {
                   through_norm(p.rows + row * p.width, p.inverse_rows[row], p.width, sum);
                 }
               });
  return true;
}

}  // namespace

// Inverse norms are outputs, or null if vectors are not to be scaled to unit length. `num_indices` is at least 1.
TURBOGR_KERNEL(sampled_logits_forward)
(const float* queries, const float* rows, const int32_t* index, float* inverse_queries, float* inverse_rows,
 float* logits, int64_t num_positions, int64_t num_indices, int64_t num_rows, int64_t width,
 float inverse_temperature) {
  if (inverse_queries != nullptr) write_inverse_norms(queries, num_positions, width, inverse_queries);
  if (inverse_rows != nullptr) write_inverse_norms(rows, num_rows, width, inverse_rows);
  const Problem p{queries,       rows,        index,    inverse_queries, inverse_rows,
                  num_positions, num_indices, num_rows, width,           inverse_temperature};
  const Score<float> score_rows = choose_score<float>(width);
  parallel_blocks(num_positions, 16, [&](int64_t begin, int64_t end) {
    const Scratch s = take_scratch<Scratch>(num_indices, width);
    for (int64_t t = begin; t < end; ++t) score(p, t, score_rows, s, logits + t * num_indices);
  });
  return kOk;
}

// `num_rows` must be below 2^32.
TURBOGR_KERNEL(sampled_logits_backward)
(const float* grad, const float* queries, const float* rows, const int32_t* index, const float* inverse_queries,
 const float* inverse_rows, float* grad_queries, float* grad_rows, int64_t num_positions, int64_t num_indices,
 int64_t num_rows, int64_t width, float inverse_temperature) {
  const Problem p{queries,       rows,        index,    inverse_queries, inverse_rows,
                  num_positions, num_indices, num_rows, width,           inverse_temperature};
  parallel_blocks(num_positions, 16, [&](int64_t begin, int64_t end) {
    const Scratch s = take_scratch<Scratch>(num_indices, width);
    for (int64_t t = begin; t < end; ++t) {
      differentiate_query(p, t, grad + t * num_indices, s, grad_queries + t * width);
    }
  });
  return differentiate_rows(p, grad, grad_rows) ? kOk : kOutOfMemory;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
