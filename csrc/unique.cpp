// unique_rows: a bitmap of the table's rows, ranked. Two passes over the ids and one over num_rows / 64 words.

#include "runtime.h"

namespace turbogr {
namespace TURBOGR_ISA {

// Writes the distinct ids, rising, to `distinct` (room for min(n, num_rows)), their number to `num_distinct`, and for
// each id its place among them to `index` [n]. Ids must lie in [0, num_rows).
TURBOGR_KERNEL(unique_rows)
(const int64_t* ids, int64_t* distinct, int64_t* index, int64_t* num_distinct, int64_t n, int64_t num_rows) {
  constexpr int64_t kIdBlock = 16384, kWordBlock = 4096;
  const int64_t words = ceil_div(num_rows, 64);
  const int64_t word_blocks = ceil_div(words, kWordBlock);
  Buffer<uint64_t> bitmap(words);
  Buffer<int64_t> ranks(words);
  Buffer<int64_t> block_ranks(word_blocks);
  if (!bitmap || !ranks || !block_ranks) return kOutOfMemory;

  parallel_blocks(words, kWordBlock, [&](int64_t begin, int64_t end) {
    std::memset(bitmap.data() + begin, 0, static_cast<size_t>(end - begin) * sizeof(uint64_t));
  });
  parallel_blocks(n, kIdBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint64_t* word = bitmap.data() + (ids[i] >> 6);
      const uint64_t bit = uint64_t(1) << (ids[i] & 63);
      if (!(__atomic_load_n(word, __ATOMIC_RELAXED) & bit)) __atomic_fetch_or(word, bit, __ATOMIC_RELAXED);
    }
  });
  parallel_blocks(words, kWordBlock, [&](int64_t begin, int64_t end) {
    int64_t count = 0;
    for (int64_t word = begin; word < end; ++word) count += __builtin_popcountll(bitmap[word]);
    block_ranks[begin / kWordBlock] = count;
  });
  int64_t total = 0;
  for (int64_t block = 0; block < word_blocks; ++block) {
    const int64_t count = block_ranks[block];
    block_ranks[block] = total;
    total += count;
  }
  *num_distinct = total;
  parallel_blocks(words, kWordBlock, [&](int64_t begin, int64_t end) {
    int64_t rank = block_ranks[begin / kWordBlock];
    for (int64_t word = begin; word < end; ++word) {
      ranks[word] = rank;
      for (uint64_t left = bitmap[word]; left != 0; left &= left - 1) {
        distinct[rank++] = word * 64 + __builtin_ctzll(left);
      }
    }
  });
  parallel_blocks(n, kIdBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t word = ids[i] >> 6;
      const uint64_t below = (uint64_t(1) << (ids[i] & 63)) - 1;
      index[i] = ranks[word] + __builtin_popcountll(bitmap[word] & below);
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
