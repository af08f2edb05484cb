// unique_rows: a bitmap of the table's rows, ranked. Two passes over the ids and one over num_rows / 64 words.

#include "runtime.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

// Ids that lie together, int32 or int64.
struct Piece {
  const void* ids;
  int64_t count, bytes_each;
};

// Calls body(ids, first, count) for blocks of the pieces, `ids` being a pointer to the block's ids in their own type
// and `first` the place of the first of them in all pieces together.
template <class Body>
void for_id_blocks(const Piece* pieces, int64_t num_pieces, Body&& body) {
  constexpr int64_t kIdBlock = 16384;
  int64_t start = 0;
  for (int64_t i = 0; i < num_pieces; ++i) {
    const Piece& piece = pieces[i];
    parallel_blocks(piece.count, kIdBlock, [&](int64_t begin, int64_t end) {
      if (piece.bytes_each == 4) {
        body(static_cast<const int32_t*>(piece.ids) + begin, start + begin, end - begin);
      } else {
        body(static_cast<const int64_t*>(piece.ids) + begin, start + begin, end - begin);
      }
    });
    start += piece.count;
  }
}

}  // namespace

// Writes the distinct ids, rising, to `distinct` (room for min(n, num_rows)), their number to `num_distinct`, and for
// each id its place among them to `index` [n], where n is the ids of all pieces together. An id outside [0, num_rows)
// makes num_distinct -1. There may be at most 2^31 - 1 distinct ids.
TURBOGR_KERNEL(unique_rows)
(const void* const* ids, const int64_t* counts, const int64_t* bytes_each, int64_t num_pieces, int64_t* distinct,
 int32_t* index, int64_t* num_distinct, int64_t num_rows) {
  constexpr int64_t kWordBlock = 4096;
  const int64_t words = ceil_div(num_rows, 64);
  const int64_t word_blocks = ceil_div(words, kWordBlock);
  Buffer<Piece> pieces(num_pieces);
  Buffer<uint64_t> bitmap(words);
  Buffer<int32_t> ranks(words);
  Buffer<int64_t> block_ranks(word_blocks);
  if (!pieces || !bitmap || !ranks || !block_ranks) return kOutOfMemory;
  for (int64_t i = 0; i < num_pieces; ++i) pieces[i] = {ids[i], counts[i], bytes_each[i]};

  parallel_blocks(words, kWordBlock, [&](int64_t begin, int64_t end) {
    std::memset(bitmap.data() + begin, 0, static_cast<size_t>(end - begin) * sizeof(uint64_t));
  });
  int64_t outside = 0;
  for_id_blocks(pieces.data(), num_pieces, [&](const auto* block, int64_t, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = block[i];
      if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(num_rows)) {
        __atomic_store_n(&outside, 1, __ATOMIC_RELAXED);
        return;
      }
      uint64_t* word = bitmap.data() + (id >> 6);
      const uint64_t bit = uint64_t(1) << (id & 63);
      if (!(__atomic_load_n(word, __ATOMIC_RELAXED) & bit)) __atomic_fetch_or(word, bit, __ATOMIC_RELAXED);
    }
  });
  if (outside != 0) {
    *num_distinct = -1;
    return kOk;
  }
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
      ranks[word] = static_cast<int32_t>(rank);
      for (uint64_t left = bitmap[word]; left != 0; left &= left - 1) {
        distinct[rank++] = word * 64 + __builtin_ctzll(left);
      }
    }
  });
  for_id_blocks(pieces.data(), num_pieces, [&](const auto* block, int64_t first, int64_t count) {
    const uint64_t* bits = bitmap.data();
    const int32_t* before = ranks.data();
    int32_t* out = index + first;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = block[i], word = id >> 6;
      const uint64_t below = (uint64_t(1) << (id & 63)) - 1;
      out[i] = before[word] + static_cast<int32_t>(__builtin_popcountll(bits[word] & below));
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
