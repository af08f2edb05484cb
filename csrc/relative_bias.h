// The relative bias between a block of rows and a block of keys: position_weight by distance in positions, time_weight
// by the bucket of the distance in time. Shared by all heads, never stored beyond a tile.
//
// The bucket of a distance is the number of boundaries that are <= it (whole numbers, so the same in every backend).
// For distances below 2^31 the exponent and three bits of the mantissa of the distance as a float name a bin that holds
// at most one boundary: a table gives the bucket at the bin's beginning and the boundary inside it. Times of a user
// rise, and buckets are wide, so most groups of 16 rows fall in one bucket: if both ends do, all do.
#pragma once

#include "attention_plan.h"

namespace turbogr {
namespace TURBOGR_ISA {

constexpr int64_t kGroups = kBlock / kGroup;

class TimeBuckets {
 public:
  TimeBuckets(const int64_t* boundaries, int64_t num_buckets) : boundaries_(boundaries), num_(num_buckets) {
    for (int bin = 0; bin < kBins; ++bin) {
      const int64_t first = first_of_bin(bin), end = first_of_bin(bin + 1);
      const int64_t base = exact(static_cast<uint64_t>(first));
      const bool more = base < num_ && boundaries_[base] < end;
      base_[bin] = static_cast<int32_t>(base);
      edge_[bin] = more ? static_cast<int32_t>(boundaries_[base]) : INT32_MAX;
      if (first < end && exact(static_cast<uint64_t>(end - 1)) > base + (more ? 1 : 0)) exact_table_ = false;
    }
  }

  // Whether of() may be used: no bin holds two boundaries.
  bool has_table() const { return exact_table_; }

  // Buckets of distances in [0, 2^31 - 1); INT32_MAX stands for no boundary.
  vi of(vi distance) const {
    const vi bin = (bits_of(to_float(max_of(distance, splat(1)))) >> 20) - kFirstBin;
    return gather(base_, bin) - (vi)(distance >= gather(edge_, bin));
  }

  // The first distance beyond a bucket, and its own first.
  int64_t end_of(int64_t bucket) const { return bucket < num_ ? boundaries_[bucket] : INT64_MAX; }
  int64_t begin_of(int64_t bucket) const { return bucket > 0 ? boundaries_[bucket - 1] : 0; }

  // Bucket of a distance, found from that of another one nearby.
  int64_t near(int64_t bucket, int64_t distance) const {
    while (distance >= end_of(bucket)) ++bucket;
    while (distance < begin_of(bucket)) --bucket;
    return bucket;
  }

  // Bucket of any distance; what overflowed int64 counts as negative, like in PyTorch.
  int64_t exact(uint64_t distance) const {
    int64_t low = 0, high = num_;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (boundaries_[middle] <= static_cast<int64_t>(distance)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

 private:
  static constexpr int kFirstBin = 127 << 3;
  static constexpr int kBins = 31 * 8 + 1;

  // The least whole number that falls in this bin or a later one, rounding to a float included.
  static int64_t first_of_bin(int bin) {
    const int exponent = bin >> 3;
    const double edge = static_cast<double>(int64_t(1) << exponent) * (1.0 + (bin & 7) / 8.0);
    int64_t first = static_cast<int64_t>(edge);
    if (static_cast<double>(first) < edge) ++first;
    while (first > 1 && static_cast<double>(static_cast<float>(first - 1)) >= edge) --first;
    return first;
  }

  const int64_t* boundaries_;
  int64_t num_;
  bool exact_table_ = true;
  int32_t base_[kBins];
  int32_t edge_[kBins];
};

// What the bias of a whole call is made of; `by_distance` points at distance 0 of a `ByDistance`.
struct BiasSource {
  const int64_t* query_times;
  const int64_t* key_times;
  const float* by_distance;
  const float* time_weight;
  const TimeBuckets* buckets;
};

// A table over distances in positions (row - key): entry `distance` is position_weight[max_len - 1 - distance], with
// room at both ends for whole tiles. Rows of a mask may see keys ahead of them, at negative distances; causal attention
// needs those of one tile only. A null weight gives zeros.
class ByDistance {
 public:
  ByDistance(const float* position_weight, int64_t max_len, const Mask& mask)
      : ahead_(2 * kBlock + (mask.causal() ? 0 : max_len)), reversed_(ahead_ + max_len + kBlock) {
    if (!reversed_) return;
    for (int64_t distance = -ahead_; distance < max_len + kBlock; ++distance) {
      const int64_t at = max_len - 1 - distance;
      const bool known = position_weight != nullptr && 0 <= at && at < 2 * max_len - 1;
      reversed_[distance + ahead_] = known ? position_weight[at] : 0.0f;
    }
  }
  explicit operator bool() const { return static_cast<bool>(reversed_); }
  const float* data() { return reversed_.data() + ahead_; }

 private:
  int64_t ahead_;
  Buffer<float> reversed_;
};

// Scratch of one tile of bias. From `bucket` and `uniform` the backward knows where each score's gradient goes.
struct BiasTile {
  float* bias;         // [kBlock][kBlock], key-major
  uint16_t* bucket;    // [kBlock][kBlock]; of a uniform group only the first is set
  uint8_t* uniform;    // [kBlock][kGroups]
  uint16_t* lowest;    // [kBlock], per key the bucket of the first row that sees it,
  uint8_t* crossed;    // [kBlock]  and how many buckets further the last row is: then groups are not set; or kMany
  int32_t* row_times;  // [kBlock + kGroup]
  int32_t* ends;       // [kLanes], [round_up(kGroups + 1, kLanes)] group beginnings and the last row

  static constexpr int kFew = 4;
  static constexpr uint8_t kMany = 255;

  void layout(Arena& arena) {
    bias = arena.take<float>(kBlock * kBlock);
    bucket = arena.take<uint16_t>(kBlock * kBlock);
    uniform = arena.take<uint8_t>(kBlock * kGroups);
    lowest = arena.take<uint16_t>(kBlock);
    crossed = arena.take<uint8_t>(kBlock);
    row_times = arena.take<int32_t>(kBlock + kGroup);
    ends = arena.take<int32_t>(round_up(kGroups + 1, kLanes));
  }
};

struct TimeRange {
  int64_t low, high;
  bool rising;
};

inline TimeRange range_of(const int64_t* times, int64_t n) {
  TimeRange range{times[0], times[0], true};
  for (int64_t i = 1; i < n; ++i) {
    range.low = min_of(range.low, times[i]);
    range.high = max_of(range.high, times[i]);
    range.rising &= times[i] >= times[i - 1];
  }
  return range;
}

// Distances beyond 31 bits, or a table that cannot be used: one pair at a time.
inline void fill_bias_slowly(const BiasSource& source, const int64_t* row_times, const int64_t* key_times, int64_t rows,
                             int64_t keys, const float* by_distance, const BiasTile& tile) {
  std::memset(tile.uniform, 0, static_cast<size_t>(keys * kGroups));
  std::memset(tile.crossed, BiasTile::kMany, static_cast<size_t>(keys));
  for (int64_t c = 0; c < keys; ++c) {
    for (int64_t r = 0; r < round_up(rows, kGroup); ++r) {
      const uint64_t difference =
          static_cast<uint64_t>(row_times[min_of(r, rows - 1)]) - static_cast<uint64_t>(key_times[c]);
      const int64_t bucket = source.buckets->exact(static_cast<int64_t>(difference) < 0 ? 0 - difference : difference);
      tile.bucket[c * kBlock + r] = static_cast<uint16_t>(bucket);
      tile.bias[c * kBlock + r] = by_distance[r - c] + source.time_weight[bucket];
    }
  }
}

// Bias of one key whose rows lie in `lowest` and the `crossed` buckets after it, later rows in later buckets.
inline void fill_bias_of_key(const BiasSource& source, const Span& s, int64_t c, int32_t key_time,
                             const float* by_distance, const BiasTile& tile) {
  const int64_t lowest = tile.lowest[c], crossed = tile.crossed[c];
  const float weight = source.time_weight[lowest];
  for (int64_t r = s.first_row(c); r < s.rows_padded; r += kLanes) {
    vf bias = splat(weight);
    if (crossed > 0) {
      const vi distance = load(tile.row_times + r) - key_time;
      vi bucket = splat(static_cast<int32_t>(lowest));
      for (int64_t b = lowest; b < lowest + crossed; ++b) {
        const vi beyond = distance >= static_cast<int32_t>(source.buckets->end_of(b));
        bucket -= beyond;
        bias = beyond ? splat(source.time_weight[b + 1]) : bias;
      }
      store(tile.bucket + c * kBlock + r, __builtin_convertvector(bucket, vs));
    }
    store(tile.bias + c * kBlock + r, load(by_distance + r - c) + bias);
  }
}

// Fills the bias of a tile. Groups of rows that, by the tile's band, do not see a key are left as they are.
TURBOGR_OUTLINE inline void fill_bias(const BiasSource& source, Span s, const BiasTile& tile) {
  const int64_t rows = s.rows, keys = s.keys;
  const int64_t* row_times = source.query_times + s.row;
  const int64_t* key_times = source.key_times + s.key;
  const float* by_distance = source.by_distance + s.place;
  const TimeRange row_range = range_of(row_times, rows), key_range = range_of(key_times, keys);
  const int64_t low = min_of(row_range.low, key_range.low), high = max_of(row_range.high, key_range.high);
  if (!source.buckets->has_table() || static_cast<uint64_t>(high) - static_cast<uint64_t>(low) >= INT32_MAX) {
    fill_bias_slowly(source, row_times, key_times, rows, keys, by_distance, tile);
    return;
  }
  const int64_t groups = ceil_div(rows, kGroup);
  for (int64_t r = 0; r < groups * kGroup; ++r) {
    tile.row_times[r] = static_cast<int32_t>(row_times[min_of(r, rows - 1)] - low);
  }
  constexpr int64_t kEnds = (kGroups + 1 + kLanes - 1) / kLanes * kLanes;
  for (int64_t g = 0; g < kEnds; ++g) tile.ends[g] = tile.row_times[min_of(g * kGroup, groups * kGroup - 1)];
  int32_t bucket_at_end[kEnds];

  int64_t lowest = 0;
  for (int64_t c = 0; c < keys; ++c) {
    const int32_t key_time = static_cast<int32_t>(key_times[c] - low);
    const int64_t first = max_of(0, c - s.band.upper);
    tile.crossed[c] = BiasTile::kMany;
    if (row_range.rising && first < rows && tile.row_times[first] >= key_time) {
      lowest = source.buckets->near(lowest, tile.row_times[first] - key_time);
      int64_t highest = lowest;
      while (highest <= lowest + BiasTile::kFew &&
             tile.row_times[rows - 1] - key_time >= source.buckets->end_of(highest)) {
        ++highest;
      }
      if (highest <= lowest + BiasTile::kFew) {
        tile.lowest[c] = static_cast<uint16_t>(lowest);
        tile.crossed[c] = static_cast<uint8_t>(highest - lowest);
        fill_bias_of_key(source, s, c, key_time, by_distance, tile);
        continue;
      }
    }
    if (row_range.rising) {
      for (int64_t e = 0; e < kEnds; e += kLanes) {
        store(bucket_at_end + e, source.buckets->of(abs_of(load(tile.ends + e) - key_time)));
      }
    }
    for (int64_t g = s.first_row(c) / kGroup; g < groups; ++g) {
      const bool one_side = tile.ends[g] >= key_time || (s.place < 0 && tile.ends[g + 1] <= key_time);
      const bool uniform = row_range.rising && one_side && bucket_at_end[g] == bucket_at_end[g + 1];
      tile.uniform[c * kGroups + g] = uniform;
      if (uniform) {
        tile.bucket[c * kBlock + g * kGroup] = static_cast<uint16_t>(bucket_at_end[g]);
        const float weight = source.time_weight[bucket_at_end[g]];
        for (int64_t r = g * kGroup; r < (g + 1) * kGroup; r += kLanes) {
          store(tile.bias + c * kBlock + r, load(by_distance + r - c) + weight);
        }
        continue;
      }
      for (int64_t r = g * kGroup; r < (g + 1) * kGroup; r += kLanes) {
        const vi bucket = source.buckets->of(abs_of(load(tile.row_times + r) - key_time));
        store(tile.bucket + c * kBlock + r, __builtin_convertvector(bucket, vs));
        store(tile.bias + c * kBlock + r, load(by_distance + r - c) + gather(source.time_weight, bucket));
      }
    }
  }
}

// Sums of gradients while tiles come in: up to kBand keys add up in float, then tiles in float, then a task in double,
// so that long sums stay precise.
struct BiasGradient {
  double* by_distance;  // of distance 0; the task has those from -ahead on
  int64_t ahead;
  double* by_bucket;     // [num_weights]
  float* tile_distance;  // [3 * kBlock]
  float* band_bucket;    // [num_weights][kLanes]
  float* tile_bucket;    // [num_weights][kLanes]
  int64_t num_weights;

  static constexpr int64_t kBand = 16;

  void layout(Arena& arena, int64_t num_time_weights) {
    tile_distance = arena.take<float>(3 * kBlock);
    band_bucket = arena.take<float>(num_time_weights * kLanes);
    tile_bucket = arena.take<float>(num_time_weights * kLanes);
    num_weights = num_time_weights;
  }

  // Points at the sums of one task, `distances` being those of all tasks, and clears them.
  void begin(const AttentionTask& task, double* distances, double* buckets) {
    ahead = task.ahead;
    by_distance = distances + task.distances;
    by_bucket = buckets;
    std::memset(by_distance - ahead, 0, static_cast<size_t>(ahead + task.rows_end - task.begin) * sizeof(double));
    std::memset(by_bucket, 0, static_cast<size_t>(num_weights) * sizeof(double));
  }
};

// Adds a tile of gradients of scores [key][row] (zeros where a row does not see the key or does not exist) by distance.
TURBOGR_OUTLINE inline void add_by_distance(Span s, const float* scores, const BiasGradient& into) {
  std::memset(into.tile_distance, 0, 3 * kBlock * sizeof(float));
  float* at_zero = into.tile_distance + kBlock;
  for (int64_t c = 0; c < s.keys; ++c) {
    for (int64_t r = s.first_row(c); r < s.rows_padded; r += kLanes) {
      store(at_zero + r - c, load(at_zero + r - c) + load(scores + c * kBlock + r));
    }
  }
  for (int64_t at = max_of(1 - s.keys, -into.ahead - s.place); at < s.rows; ++at) {
    into.by_distance[s.place + at] += static_cast<double>(at_zero[at]);
  }
}

// Adds the gradients of one key whose rows lie in few buckets.
inline void add_key_by_bucket(const Span& s, int64_t c, const float* scores, const BiasTile& tile, float* buckets) {
  const int32_t lowest = tile.lowest[c], crossed = tile.crossed[c];
  vf totals[BiasTile::kFew + 1] = {};
  for (int64_t r = s.first_row(c); r < s.rows_padded; r += kLanes) {
    const vf gradient = load(scores + c * kBlock + r);
    if (crossed == 0) {
      totals[0] += gradient;
      continue;
    }
    const vi bucket = __builtin_convertvector(load(tile.bucket + c * kBlock + r), vi);
    for (int b = 0; b <= crossed; ++b) totals[b] += bucket == lowest + b ? gradient : vf{};
  }
  for (int b = 0; b <= crossed; ++b) {
    float* const sum = buckets + (lowest + b) * kLanes;
    store(sum, load(sum) + totals[b]);
  }
}

// Adds the whole tile by its buckets.
TURBOGR_OUTLINE inline void add_by_bucket(Span s, const float* scores, const BiasTile& tile, const BiasGradient& into) {
  const int64_t groups = ceil_div(s.rows, kGroup), size = into.num_weights * kLanes;
  std::memset(into.band_bucket, 0, static_cast<size_t>(size) * sizeof(float));
  std::memset(into.tile_bucket, 0, static_cast<size_t>(size) * sizeof(float));
  for (int64_t c = 0; c < s.keys; ++c) {
    const bool few = tile.crossed[c] != BiasTile::kMany;
    if (few) add_key_by_bucket(s, c, scores, tile, into.band_bucket);
    for (int64_t g = s.first_row(c) / kGroup; !few && g < groups; ++g) {
      const float* gradient = scores + c * kBlock + g * kGroup;
      const uint16_t* bucket = tile.bucket + c * kBlock + g * kGroup;
      if (tile.uniform[c * kGroups + g]) {
        vf total{};
        for (int64_t r = 0; r < kGroup; r += kLanes) total += load(gradient + r);
        float* sum = into.band_bucket + int64_t(bucket[0]) * kLanes;
        store(sum, load(sum) + total);
        continue;
      }
      for (int64_t r = 0; r < kGroup; ++r) into.band_bucket[int64_t(bucket[r]) * kLanes + r % kLanes] += gradient[r];
    }
    if (c % BiasGradient::kBand == BiasGradient::kBand - 1 || c == s.keys - 1) {
      for (int64_t i = 0; i < size; i += kLanes) {
        store(into.tile_bucket + i, load(into.tile_bucket + i) + load(into.band_bucket + i));
        store(into.band_bucket + i, vf{});
      }
    }
  }
  for (int64_t b = 0; b < into.num_weights; ++b) {
    into.by_bucket[b] += static_cast<double>(sum(load(into.tile_bucket + b * kLanes)));
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
