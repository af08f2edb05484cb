// Sums of many scaled vectors by row: sums[row(p, j)] += coefficient(p, j) * vectors[p], for every position p and every
// j of a fixed number of terms each. It is how the gradients of a position reach the many rows it was scored against.
// Positions that were scored against the same rows form a group g, and a term is then a sum over its members:
// sums[row(g, j)] += sum_i coefficient(g, j, i) * vectors[offsets[g] + i].
//
// The terms are sorted by ranges of rows, in the order of positions, then each range is summed by one thread, with
// its sums in cache. Nothing depends on the number of threads. Positions are taken in portions, so that the sorted
// terms stay within a budget.
#pragma once

#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {

class RowSums {
 public:
  // vectors [num_positions, width]; a portion holds about `portion` terms. With `offsets`, there are `num_positions`
  // groups of at most `largest` vectors. Test the object before use: it is false when memory ran out.
  RowSums(const float* vectors, int64_t width, int64_t num_rows, int64_t num_positions, int64_t terms, int64_t portion,
          const int64_t* offsets = nullptr, int64_t largest = 1)
      : vectors_(vectors),
        offsets_(offsets),
        largest_(largest),
        width_(width),
        padded_(round_up(width, kLanes)),
        num_rows_(num_rows),
        num_positions_(num_positions),
        terms_(terms),
        shift_(choose_shift(num_rows, padded_)),
        ranges_((num_rows >> shift_) + 1),
        per_portion_(max_of(1, min_of(min_of(num_positions, portion / (terms * ceil_div(largest, kMembers))),
                                      int64_t(1) << (32 - shift_)))),
        sorted_(per_portion_ * terms),
        coefficients_(offsets ? per_portion_ * terms * largest : ceil_div(per_portion_, kChunk) * line_up(terms)),
        next_(ceil_div(per_portion_, kChunk) * line_up(ranges_)),
        starts_(ranges_ + 1) {}

  explicit operator bool() const { return sorted_ && coefficients_ && next_ && starts_; }

  // row_of(position, j) gives a term's row, coefficients_of(position, out [terms, largest]) its coefficients; both are
  // called from several threads. finish(row, sum) is called once for each row's complete sum, which may be changed in
  // place before it is written to target [num_rows, width]. A sum has room for whole vectors.
  template <class RowOf, class CoefficientsOf, class Finish>
  void add_all(RowOf&& row_of, CoefficientsOf&& coefficients_of, float* target, Finish&& finish) {
    for (int64_t first = 0; first < max_of(1, num_positions_); first += per_portion_) {
      const int64_t end = min_of(num_positions_, first + per_portion_);
      sort_terms(first, end, row_of, coefficients_of);
      parallel_tasks(
          ranges_, [&](int64_t range) { sum_range(range, first, first == 0, end == num_positions_, target, finish); });
    }
  }

 private:
  static constexpr int64_t kChunk = 64;    // positions of a task
  static constexpr int64_t kMembers = 16;  // of a group, from which on a portion holds fewer terms

  // Room for n words, such that no two threads ever write to one line of memory.
  static int64_t line_up(int64_t n) { return round_up(n, 32); }

  // A position of the portion and a row of the range, packed in one word; and the coefficient, or, of a group, the
  // number of its coefficients in the portion.
  struct Term {
    uint32_t place;
    union {
      float coefficient;
      uint32_t number;
    };
  };

  struct RangeScratch {
    float* sums;
    void layout(Arena& arena, int64_t floats) { sums = arena.take<float>(floats); }
  };

  // The sums of a range stay in the first-level cache, or in the second where that makes too many ranges.
  static int choose_shift(int64_t num_rows, int64_t padded) {
    int shift = 0;
    const auto bytes = [&] { return (int64_t(2) << shift) * padded * 4; };
    while (bytes() <= 131072 || (bytes() <= 262144 && (num_rows >> shift) >= 64) || (num_rows >> shift) >= 1024)
      ++shift;
    return shift;
  }

  template <class RowOf, class CoefficientsOf>
  void sort_terms(int64_t first, int64_t end, RowOf&& row_of, CoefficientsOf&& coefficients_of) {
    const int64_t chunks = ceil_div(end - first, kChunk);
    parallel_tasks(chunks, [&](int64_t chunk) {
      uint32_t* count = next_.data() + chunk * line_up(ranges_);
      std::memset(count, 0, static_cast<size_t>(ranges_) * sizeof(uint32_t));
      for (int64_t t = first + chunk * kChunk; t < min_of(end, first + (chunk + 1) * kChunk); ++t) {
        for (int64_t j = 0; j < terms_; ++j) ++count[row_of(t, j) >> shift_];
      }
    });
    uint32_t total = 0;
    for (int64_t range = 0; range < ranges_; ++range) {
      starts_[range] = total;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        uint32_t& next = next_[chunk * line_up(ranges_) + range];
        const uint32_t count = next;
        next = total;
        total += count;
      }
    }
    starts_[ranges_] = total;
    parallel_tasks(chunks, [&](int64_t chunk) {
      const int64_t begin = first + chunk * kChunk;
      const int64_t last = min_of(end, begin + kChunk);
      uint32_t* const next = next_.data() + chunk * line_up(ranges_);
      if (offsets_ != nullptr) {
        sort_groups(begin, last, begin - first, next, row_of, coefficients_of);
      } else {
        sort_chunk(begin, last, begin - first, coefficients_.data() + chunk * line_up(terms_), next, row_of,
                   coefficients_of);
      }
    });
  }

  template <class RowOf, class CoefficientsOf>
  void sort_chunk(int64_t begin, int64_t end, int64_t place, float* coefficients, uint32_t* next, RowOf&& row_of,
                  CoefficientsOf&& coefficients_of) {
    Term* const sorted = sorted_.data();
    const int shift = shift_;
    const int64_t terms = terms_;
    const uint32_t in_range = (uint32_t(1) << shift) - 1;
    for (int64_t t = begin; t < end; ++t, ++place) {
      coefficients_of(t, coefficients);
      const uint32_t position = static_cast<uint32_t>(place) << shift;
      for (int64_t j = 0; j < terms; ++j) {
        const uint32_t row = static_cast<uint32_t>(row_of(t, j));
        Term& term = sorted[next[row >> shift]++];
        term.place = position | (row & in_range);
        term.coefficient = coefficients[j];
      }
    }
  }

  template <class RowOf, class CoefficientsOf>
  void sort_groups(int64_t begin, int64_t end, int64_t place, uint32_t* next, RowOf&& row_of,
                   CoefficientsOf&& coefficients_of) {
    Term* const sorted = sorted_.data();
    const uint32_t in_range = (uint32_t(1) << shift_) - 1;
    for (int64_t g = begin; g < end; ++g, ++place) {
      coefficients_of(g, coefficients_.data() + place * terms_ * largest_);
      const uint32_t position = static_cast<uint32_t>(place) << shift_;
      for (int64_t j = 0; j < terms_; ++j) {
        const uint32_t row = static_cast<uint32_t>(row_of(g, j));
        Term& term = sorted[next[row >> shift_]++];
        term.place = position | (row & in_range);
        term.number = static_cast<uint32_t>(place * terms_ + j);
      }
    }
  }

  template <class Finish>
  void sum_range(int64_t range, int64_t first_position, bool first, bool last, float* target, Finish&& finish) {
    const int64_t begin = range << shift_, rows = min_of(num_rows_ - begin, int64_t(1) << shift_);
    if (rows <= 0) return;
    float* sums = take_scratch<RangeScratch>((rows + 1) * padded_).sums;
    const size_t row_bytes = static_cast<size_t>(width_) * sizeof(float);
    std::memset(sums, 0, static_cast<size_t>(rows * padded_) * sizeof(float));
    if (!first) {
      for (int64_t row = 0; row < rows; ++row)
        std::memcpy(sums + row * padded_, target + (begin + row) * width_, row_bytes);
    }
    add_terms(sorted_.data() + starts_[range], starts_[range + 1] - starts_[range], first_position, sums);
    for (int64_t row = 0; row < rows; ++row) {
      if (last) finish(begin + row, sums + row * padded_);
      std::memcpy(target + (begin + row) * width_, sums + row * padded_, row_bytes);
    }
  }

  void add_terms(const Term* terms, int64_t n, int64_t first_position, float* sums) const {
    using Add = void (RowSums::*)(const Term*, int64_t, int64_t, int64_t, int, float*) const;
    static constexpr Add kAdds[2][8] = {
        {&RowSums::add_columns<1>, &RowSums::add_columns<2>, &RowSums::add_columns<3>, &RowSums::add_columns<4>,
         &RowSums::add_columns<5>, &RowSums::add_columns<6>, &RowSums::add_columns<7>, &RowSums::add_columns<8>},
        {&RowSums::add_groups<1>, &RowSums::add_groups<2>, &RowSums::add_groups<3>, &RowSums::add_groups<4>,
         &RowSums::add_groups<5>, &RowSums::add_groups<6>, &RowSums::add_groups<7>, &RowSums::add_groups<8>}};
    for (int64_t column = 0; column < width_; column += 8 * kLanes) {
      const int64_t columns = min_of(8 * kLanes, width_ - column);
      const int64_t parts = ceil_div(columns, kLanes);
      const int last = static_cast<int>(columns - (parts - 1) * kLanes);
      (this->*kAdds[offsets_ != nullptr][parts - 1])(terms, n, first_position, column, last, sums + column);
    }
  }

  // Over Vectors vectors of columns, the last of `last` columns. Terms come in the order of positions, so a vector that
  // several terms share is in cache; to look whether it has changed costs more than to load it again.
  template <int Vectors>
  void add_columns(const Term* terms, int64_t n, int64_t first, int64_t column, int last, float* sums) const {
    const uint32_t in_range = (uint32_t(1) << shift_) - 1;
    const float* const vectors = vectors_ + first * width_ + column;
    const int64_t width = width_, padded = padded_;
    const int shift = shift_;
    for (int64_t i = 0; i < n; ++i) {
      const Term term = terms[i];
      const float* from = vectors + int64_t(term.place >> shift) * width;
      float* sum = sums + int64_t(term.place & in_range) * padded;
      vf total[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors - 1; ++v) {
        total[v] = load(sum + v * kLanes) + term.coefficient * load(from + v * kLanes);
      }
      const vf end = load_some(from + (Vectors - 1) * kLanes, last);
      total[Vectors - 1] = load(sum + (Vectors - 1) * kLanes) + term.coefficient * end;
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) store(sum + v * kLanes, total[v]);
    }
  }

  // The same for groups: a row's sum stays in registers while the vectors of a group are added to it.
  template <int Vectors>
  void add_groups(const Term* terms, int64_t n, int64_t first, int64_t column, int last, float* sums) const {
    const uint32_t in_range = (uint32_t(1) << shift_) - 1;
    for (int64_t i = 0; i < n; ++i) {
      const Term term = terms[i];
      const int64_t group = first + (term.place >> shift_);
      const float* coefficients = &coefficients_[term.number * largest_];
      float* sum = sums + int64_t(term.place & in_range) * padded_;
      vf total[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) total[v] = load(sum + v * kLanes);
      for (int64_t position = offsets_[group]; position < offsets_[group + 1]; ++position, ++coefficients) {
        const float* from = vectors_ + position * width_ + column;
#pragma GCC unroll 8
        for (int v = 0; v < Vectors - 1; ++v) total[v] += *coefficients * load(from + v * kLanes);
        total[Vectors - 1] += *coefficients * load_some(from + (Vectors - 1) * kLanes, last);
      }
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) store(sum + v * kLanes, total[v]);
    }
  }

  const float* vectors_;
  const int64_t* offsets_;
  int64_t largest_;
  int64_t width_, padded_, num_rows_, num_positions_, terms_;
  int shift_;
  int64_t ranges_, per_portion_;
  Buffer<Term> sorted_;
  Buffer<float> coefficients_;  // a row for each chunk of positions
  Buffer<uint32_t> next_, starts_;
};

}  // namespace TURBOGR_ISA
}  // namespace turbogr
