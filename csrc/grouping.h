// Groups n elements by row: a stable counting sort that runs in parallel and gives the same order for any number of
// threads.
#pragma once

#include "runtime.h"

namespace turbogr {
namespace TURBOGR_ISA {

// Fills `starts` [num_rows + 1] and `order` [n] so that order[starts[r]] ... order[starts[r + 1] - 1] are, rising, the
// i with row_of(i) == r. Needs n < 2^32 and rows in range; false when memory runs out.
template <class RowOf>
bool group_by_row(int64_t n, int64_t num_rows, RowOf&& row_of, uint32_t* starts, uint32_t* order) {
  constexpr int64_t kChunk = 65536;
  int shift = 0;
  while ((num_rows >> shift) >= 256) ++shift;
  const int64_t ranges = (num_rows >> shift) + 1;
  const int64_t chunks = ceil_div(n, kChunk);
  Buffer<uint32_t> by_range(n);
  Buffer<uint32_t> counts(chunks * ranges);
  Buffer<uint32_t> range_starts(ranges + 1);
  if (!by_range || !counts || !range_starts) return false;

  parallel_tasks(chunks, [&](int64_t chunk) {
    uint32_t* count = counts.data() + chunk * ranges;
    std::memset(count, 0, static_cast<size_t>(ranges) * sizeof(uint32_t));
    for (int64_t i = chunk * kChunk; i < min_of(n, (chunk + 1) * kChunk); ++i) ++count[row_of(i) >> shift];
  });
  uint32_t total = 0;
  for (int64_t range = 0; range < ranges; ++range) {
    range_starts[range] = total;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t count = counts[chunk * ranges + range];
      counts[chunk * ranges + range] = total;
      total += count;
    }
  }
  range_starts[ranges] = total;
  parallel_tasks(chunks, [&](int64_t chunk) {
    uint32_t* next = counts.data() + chunk * ranges;
    for (int64_t i = chunk * kChunk; i < min_of(n, (chunk + 1) * kChunk); ++i) {
      by_range[next[row_of(i) >> shift]++] = static_cast<uint32_t>(i);
    }
  });
  parallel_tasks(ranges, [&](int64_t range) {
    const int64_t first_row = range << shift;
    const int64_t last_row = min_of(num_rows, (range + 1) << shift);
    const uint32_t begin = range_starts[range], end = range_starts[range + 1];
    for (int64_t row = first_row; row < last_row; ++row) starts[row] = 0;
    for (uint32_t at = begin; at < end; ++at) ++starts[row_of(by_range[at])];
    uint32_t next = begin;
    for (int64_t row = first_row; row < last_row; ++row) {
      const uint32_t count = starts[row];
      starts[row] = next;
      next += count;
    }
    for (uint32_t at = begin; at < end; ++at) {
      const uint32_t i = by_range[at];
      order[starts[row_of(i)]++] = i;
    }
    // Every start has moved to its row's end; move them back by one row.
    for (int64_t row = last_row - 1; row > first_row; --row) starts[row] = starts[row - 1];
    if (first_row < last_row) starts[first_row] = begin;
  });
  starts[num_rows] = total;
  return true;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
