// Which rows see which keys: for sequences, for blocks of rows, and for one tile.
//
// Row i of a sequence sees the keys j with first_i <= j < last_i, and always itself. Without ranges attention is
// causal: j <= i. Sequences are cut into blocks of kBlock rows and kBlock keys. Of each block of rows we keep the least
// and greatest ends of its ranges, which decide most tiles without reading the rows:
//   no row sees a key          the tile is skipped
//   all rows see all keys      computed without a mask
//   on the diagonal, j <= i    computed as in causal attention
//   anything else              computed between the outermost diagonals that have a pair, and then scores that do not
//                              exist are set to zero
#pragma once

#include "tile_gemm.h"

namespace turbogr {
namespace TURBOGR_ISA {

struct KeyRange {
  int64_t begin, end;
};

// first and last of all tokens, [T]; null for causal attention.
struct KeyRanges {
  const int64_t *first, *last;

  // Keys of row i of the sequence that begins at token `start`. The row's own key is in it if the range touches it;
  // otherwise the row sees that key besides.
  KeyRange of(int64_t start, int64_t i) const {
    const int64_t begin = first[start + i], end = last[start + i];
    if (begin >= end) return {i, i + 1};
    return {begin == i + 1 ? i : begin, end == i ? i + 1 : end};
  }
};

// One tile: rows [row, row + rows) and keys [key, key + keys) as tokens of the batch. Loops take it by value: then the
// compiler knows that what they store does not change it.
struct Span {
  int64_t row, rows, rows_padded, key, keys;
  int64_t place;  // first row - first key, in positions of the sequence
  Band band;
  // Row r sees the keys begin[r] <= c < end[r] of the tile, and key r + place. Null: all keys within the band.
  const int32_t *begin = nullptr, *end = nullptr;

  Span(int64_t start, int64_t length, int64_t first_row, int64_t first_key)
      : row(start + first_row),
        rows(min_of(kBlock, length - first_row)),
        rows_padded(round_up(rows, kGroup)),
        key(start + first_key),
        keys(min_of(kBlock, length - first_key)),
        place(first_row - first_key),
        band(place) {}

  bool masked() const { return begin != nullptr; }

  // Where the first vector of rows begins that holds a row within the upper diagonal of key c.
  int64_t first_row(int64_t c) const { return max_of(0, c - band.upper) / kLanes * kLanes; }

  // Of a masked tile: which lanes of rows [r, r + kLanes) see key c.
  vi sees(int64_t c, int64_t r) const {
    const vi key_number = splat(static_cast<int32_t>(c));
    const vi own = lane_numbers() + static_cast<int32_t>(place == 0 ? r : kBlock);  // blocks are aligned
    return ((key_number >= load(begin + r)) & (key_number < load(end + r))) | (key_number == own);
  }
};

// Writes zeros to the scores of a tile [key][row] that do not exist.
TURBOGR_OUTLINE inline void clear_masked(Span s, float* scores) {
  for (int64_t c = 0; c < s.keys; ++c) {
    for (int64_t r = 0; r < s.rows_padded; r += kLanes) {
      float* at = scores + c * kBlock + r;
      store(at, s.sees(c, r) ? load(at) : vf{});
    }
  }
}

inline void clear_unseen(const Span& s, float* scores) {
  if (s.masked()) {
    clear_masked(s, scores);
  } else {
    clear_unseen(s.keys, scores, s.band.upper);
  }
}

// What the rows of one block see, taken together.
struct RowBlock {
  int64_t least_begin, greatest_begin, least_end, greatest_end;
  int64_t pairs;  // of a row and a key that it sees
  bool causal;    // every row's range ends with the row itself

  bool may_see(const KeyRange& keys) const { return least_begin < keys.end && greatest_end > keys.begin; }
  bool sees_all(const KeyRange& keys) const { return greatest_begin <= keys.begin && least_end >= keys.end; }
};

inline RowBlock sum_up(const KeyRanges& ranges, int64_t start, int64_t row, int64_t row_end) {
  const KeyRange first = ranges.of(start, row);
  RowBlock block{first.begin, first.begin, first.end, first.end, 0, true};
  for (int64_t i = row; i < row_end; ++i) {
    const KeyRange keys = ranges.of(start, i);
    block.least_begin = min_of(block.least_begin, keys.begin);
    block.greatest_begin = max_of(block.greatest_begin, keys.begin);
    block.least_end = min_of(block.least_end, keys.end);
    block.greatest_end = max_of(block.greatest_end, keys.end);
    block.pairs += keys.end - keys.begin + (i < keys.begin || i >= keys.end ? 1 : 0);
    block.causal &= keys.end == i + 1;
  }
  return block;
}

// Scratch for the ends of a masked tile's rows.
struct RowEnds {
  int32_t *begin, *end;  // [kBlock]

  void layout(Arena& arena) {
    begin = arena.take<int32_t>(kBlock);
    end = arena.take<int32_t>(kBlock);
  }
};

// The mask of a call.
class Mask {
 public:
  Mask(const KeyRanges& ranges, const int64_t* offsets, int64_t num_sequences, int64_t num_tokens)
      : ranges_(ranges),
        first_block_(causal() ? 0 : num_sequences),
        blocks_(causal() ? 0 : num_tokens / kBlock + num_sequences) {
    if (causal() || !*this) return;
    int64_t count = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
      first_block_[s] = count;
      count += ceil_div(offsets[s + 1] - offsets[s], kBlock);
    }
    parallel_tasks(num_sequences, [&](int64_t s) {
      const int64_t length = offsets[s + 1] - offsets[s];
      for (int64_t row = 0; row < length; row += kBlock) {
        blocks_[first_block_[s] + row / kBlock] = sum_up(ranges_, offsets[s], row, min_of(length, row + kBlock));
      }
    });
  }

  explicit operator bool() const { return first_block_ && blocks_; }
  bool causal() const { return ranges_.first == nullptr; }
  const KeyRanges& ranges() const { return ranges_; }

  // The blocks of rows of a sequence, in order; null if attention is causal.
  const RowBlock* blocks(int64_t sequence) const { return causal() ? nullptr : &blocks_[first_block_[sequence]]; }

  // Completes a tile of the sequence at token `start` by what its rows see; false if they see nothing of it.
  bool look(const RowBlock* blocks, int64_t start, Span& span, const RowEnds& ends) const {
    if (causal()) return span.place >= 0;
    const int64_t row = span.row - start, key = span.key - start;
    const RowBlock& block = blocks[row / kBlock];
    const KeyRange keys{key, key + span.keys};
    if (span.place == 0 && block.causal && block.greatest_begin <= key) return true;
    span.band = Band(kBlock);
    if (block.sees_all(keys)) return true;
    if (span.place != 0 && !block.may_see(keys)) return false;
    return fill_ends(row, key, start, span, ends);
  }

 private:
  // Finds the ends of a tile's rows, relative to its first key, and the band; false if there is no pair at all.
  bool fill_ends(int64_t row, int64_t key, int64_t start, Span& span, const RowEnds& ends) const {
    Band band(-kBlock, kBlock);
    for (int64_t r = 0; r < span.rows_padded; ++r) {
      const KeyRange keys = r < span.rows ? ranges_.of(start, row + r) : KeyRange{key, key};
      ends.begin[r] = static_cast<int32_t>(max_of(0, min_of(span.keys, keys.begin - key)));
      ends.end[r] = static_cast<int32_t>(max_of(0, min_of(span.keys, keys.end - key)));
      if (ends.begin[r] >= ends.end[r]) continue;
      band.lower = min_of(band.lower, ends.begin[r] - r);
      band.upper = max_of(band.upper, ends.end[r] - 1 - r);
    }
    if (span.place == 0) band = Band(max_of(band.upper, 0), min_of(band.lower, 0));
    span.band = band;
    span.begin = ends.begin;
    span.end = ends.end;
    return band.lower <= band.upper;
  }

  KeyRanges ranges_;
  Buffer<int64_t> first_block_;
  Buffer<RowBlock> blocks_;
};

}  // namespace TURBOGR_ISA
}  // namespace turbogr
