// unique_rows: a bitmap of the rows, and for each word of it the number of bits set before. Two passes over the ids and
// a few over num_rows / 64 words.

#include "runtime.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

// The ids of one tensor, int32 or int64. Id i is row base + i, 0 <= i < size. `start`: number of ids in the tensors
// before.
struct Piece {
  const void* ids;
  int64_t start, count, bytes_each, base, size;
};

// A base of 0 that the compiler knows.
struct NoBase {
  constexpr operator int64_t() const { return 0; }
};

// Calls body(piece, base, ids, first, count) for runs of ids that together cover all pieces, in parallel: `ids` points
// to the run's ids in their own type, and `first` is the position of the first of them in all pieces together.
template <class Body>
void for_id_runs(const Piece* pieces, int64_t num_pieces, int64_t num_ids, Body&& body) {
  constexpr int64_t kIdBlock = 16384;
  parallel_blocks(num_ids, kIdBlock, [&](int64_t block_begin, int64_t block_end) {
    for (int64_t i = 0; i < num_pieces; ++i) {
      const Piece& piece = pieces[i];
      const int64_t begin = max_of(0, block_begin - piece.start), end = min_of(piece.count, block_end - piece.start);
      if (begin >= end) continue;
      const auto with_base = [&](auto base) {
        if (piece.bytes_each == 4) {
          body(piece, base, static_cast<const int32_t*>(piece.ids) + begin, piece.start + begin, end - begin);
        } else {
          body(piece, base, static_cast<const int64_t*>(piece.ids) + begin, piece.start + begin, end - begin);
        }
      };
      piece.base == 0 ? with_base(NoBase()) : with_base(piece.base);
    }
  });
}

}  // namespace

// Writes the distinct rows, rising, to `distinct` (room for min(n, num_rows)), their number to `num_distinct`, and for
// each id the position of its row among them to `index` [n], where n is the number of ids of all pieces together.
// `tables` has base and size of each piece's table in turn; if it is null, an id is a row, and the size is num_rows.
// An id outside its table makes num_distinct -1. There may be at most 2^31 - 1 distinct rows.
TURBOGR_KERNEL(unique_rows)
(const void* const* ids, const int64_t* counts, const int64_t* bytes_each, const int64_t* tables, int64_t num_pieces,
 int64_t* distinct, int32_t* index, int64_t* num_distinct, int64_t num_rows) {
  constexpr int64_t kWordBlock = 4096;
  const int64_t words = ceil_div(num_rows, 64);
  const int64_t word_blocks = ceil_div(words, kWordBlock);
  Buffer<Piece> pieces(num_pieces);
  Buffer<uint64_t> bitmap(words);
  Buffer<int32_t> bits_before(words);
  Buffer<int64_t> block_starts(word_blocks);
  if (!pieces || !bitmap || !bits_before || !block_starts) return kOutOfMemory;
  int64_t num_ids = 0;
  for (int64_t i = 0; i < num_pieces; ++i) {
    const int64_t base = tables != nullptr ? tables[2 * i] : 0, size = tables != nullptr ? tables[2 * i + 1] : num_rows;
    pieces[i] = {ids[i], num_ids, counts[i], bytes_each[i], base, size};
    num_ids += counts[i];
  }

  parallel_blocks(words, kWordBlock, [&](int64_t begin, int64_t end) {
    std::memset(bitmap.data() + begin, 0, static_cast<size_t>(end - begin) * sizeof(uint64_t));
  });
  int64_t outside = 0;
  for_id_runs(pieces.data(), num_pieces, num_ids,
              [&](const Piece& piece, auto base, const auto* run, int64_t, int64_t count) {
                const int64_t size = piece.size;
                for (int64_t i = 0; i < count; ++i) {
                  const int64_t id = run[i];
                  if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(size)) {
                    __atomic_store_n(&outside, 1, __ATOMIC_RELAXED);
                    return;
                  }
                  const int64_t row = base + id;
                  uint64_t* word = bitmap.data() + (row >> 6);
                  const uint64_t bit = uint64_t(1) << (row & 63);
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
    block_starts[begin / kWordBlock] = count;
  });
  int64_t total = 0;
  for (int64_t block = 0; block < word_blocks; ++block) {
    const int64_t count = block_starts[block];
    block_starts[block] = total;
    total += count;
  }
  *num_distinct = total;
  parallel_blocks(words, kWordBlock, [&](int64_t begin, int64_t end) {
    int64_t position = block_starts[begin / kWordBlock];
    for (int64_t word = begin; word < end; ++word) {
      bits_before[word] = static_cast<int32_t>(position);
      for (uint64_t left = bitmap[word]; left != 0; left &= left - 1) {
        distinct[position++] = word * 64 + __builtin_ctzll(left);
      }
    }
  });
  for_id_runs(pieces.data(), num_pieces, num_ids,
              [&](const Piece&, auto base, const auto* run, int64_t first, int64_t count) {
                const uint64_t* bits = bitmap.data();
                const int32_t* before = bits_before.data();
                int32_t* out = index + first;
                for (int64_t i = 0; i < count; ++i) {
                  const int64_t row = base + run[i], word = row >> 6;
                  const uint64_t below = (uint64_t(1) << (row & 63)) - 1;
                  out[i] = before[word] + static_cast<int32_t>(__builtin_popcountll(bits[word] & below));
                }
              });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
