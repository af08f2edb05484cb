// Full softmax: the loss of every position against all rows of a table, and its gradients, without a [T, V] array.
//
// Both directions do the same. A block of vectors is held in scratch memory, transposed, one vector per lane; the
// vectors of the other side are streamed past it in tiles. A tile gives logits, scores[streamed][held], which are
// turned into weights, and the weighted sum of the tile's vectors is added to one sum per held vector.
//
// Forward: positions are held, rows are streamed. Weights are exponentials relative to the highest logit so far; when a
// tile has a higher one, the sums so far are scaled down. The sum becomes the gradient of the query for a unit gradient
// of the loss. Backward: rows are held, positions are streamed, and the highest logits and the sums of exponentials
// that the forward kept make the weights probabilities. That is four matrix products in all, one more than with all
// logits in memory.
//
// Each sum is made by one thread, in the order of the streamed vectors: results do not depend on the number of threads.

#include "panel_gemm.h"
#include "unit_vectors.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

// Vectors of a streamed tile: enough that loading and storing the sums costs little, few enough for the second-level
// cache.
constexpr int64_t kStreamed = 192;
static_assert(kStreamed % kTileRows == 0, "tiles must hold whole micro-tiles");

constexpr float kNegligible = -80.0f;  // logarithm of the largest weight that counts as zero

// Vectors [num, width] of one side. They enter the products multiplied by `scale` and, if not null, `inverse_norms`.
struct Side {
  const float *vectors, *inverse_norms;
  float scale;
  int64_t num, width;

  const float* vector(int64_t i) const { return vectors + i * width; }
  float factor(int64_t i) const { return inverse_norms != nullptr ? inverse_norms[i] * scale : scale; }

  void pack(int64_t begin, int64_t end, float* to, int64_t stride) const {
    for (int64_t i = begin; i < end; ++i, to += stride) pack_rows(vector(i), width, 1, width, factor(i), to, 1, stride);
  }
};

struct Problem {
  Side queries, rows;  // logits are products of their packed vectors
  const int32_t* targets;
};

struct Scratch {
  int64_t stride;  // floats from one packed vector to the next
  float* held;     // [width, kBlock]
  float* streamed;
  float* scores;  // [kStreamed, kBlock]
  float* sums;    // one packed vector per held vector

  void layout(Arena& arena, int64_t width) {
    stride = scratch_stride(width);
    held = arena.take<float>(width * kBlock);
    streamed = arena.take<float>(kStreamed * stride);
    scores = arena.take<float>(kStreamed * kBlock);
    sums = arena.take<float>(kBlock * stride);
  }
  void clear_sums() const { std::memset(sums, 0, static_cast<size_t>(kBlock * stride) * sizeof(float)); }
};

// Vectors held together: at most kBlock, fewer if there would be less than 16 tasks.
int64_t held_block(int64_t num) { return min_of(kBlock, round_up(num / 16 + 1, kTileColumns)); }

// A part of a tile of scores: `count` streamed vectors from `first`, kTileColumns held ones from the `column`-th of
// their block. The score of streamed vector j and held vector i is at(j)[i].
struct Strip {
  int64_t first, count, column;
  float* scores;

  float* at(int64_t j) const { return scores + j * kBlock; }
};

// Streams one side past the held vectors [begin, end) of the other. weigh(strip) turns logits into weights; when that
// is done for a tile, add_weighted(tile) is called, which must call add_tile if sums are wanted.
template <class Weigh, class AddWeighted>
void stream(const Side& held, int64_t begin, int64_t end, const Side& streamed, const Scratch& s, Weigh&& weigh,
            AddWeighted&& add_weighted) {
  const int64_t width = held.width, num = end - begin;
  s.clear_sums();  // room for the vectors before they are transposed, with zeros in idle lanes
  held.pack(begin, end, s.sums, s.stride);
  pack_transposed(s.sums, s.stride, round_up(num, kTileColumns), width, 1.0f, s.held);
  s.clear_sums();
  for (int64_t first = 0; first < streamed.num; first += kStreamed) {
    const int64_t count = min_of(kStreamed, streamed.num - first);
    streamed.pack(first, first + count, s.streamed, s.stride);
    for (int64_t column = 0; column < num; column += kTileColumns) {
      const Strip strip{first, count, column, s.scores + column};
      tile_scores(count, kTileColumns, width, s.streamed, s.stride, s.held + column, nullptr, strip.scores, count);
      weigh(strip);
    }
    add_weighted(count);
  }
}

// Adds the weighted sum of a tile's `count` vectors to the sums of `num` held ones.
void add_tile(const Scratch& s, int64_t count, int64_t num, int64_t width) {
  tile_add_by_row(count, num, round_up(width, kLanes), s.scores, s.streamed, s.stride, s.sums, s.stride, count);
}

// e^x for x up to 0, or a little more by rounding.
inline vf weight_of(vf x) {
  return x < kNegligible ? vf{} : exp_of(x) + (x - x);  // exp_of drops a NaN, x - x keeps it
}

// The softmaxes of a block of positions, built up tile by tile.
struct Softmaxes {
  alignas(64) float top[kBlock], total[kBlock], own[kBlock];
  alignas(64) float decay[kBlock];  // of the last tile: what earlier sums must be multiplied by

  Softmaxes() {
    for (int64_t i = 0; i < kBlock; ++i) {
      top[i] = -3e38f;
      total[i] = own[i] = 0.0f;
    }
  }

  // Replaces logits by their exponentials relative to the new top.
  TURBOGR_OUTLINE void add(const Strip& strip) {
    for (int64_t c = 0; c < kTileColumns; c += kLanes) {
      const int64_t lanes = strip.column + c;
      vf highest = load(top + lanes);
      for (int64_t j = 0; j < strip.count; ++j) highest = max_of(load(strip.at(j) + c), highest);
      vf sums{};
      for (int64_t j = 0; j < strip.count; ++j) {
        const vf weight = weight_of(load(strip.at(j) + c) - highest);
        store(strip.at(j) + c, weight);
        sums += weight;
      }
      const vf shrunk = exp_of(load(top + lanes) - highest);
      store(decay + lanes, shrunk);
      store(total + lanes, load(total + lanes) * shrunk + sums);
      store(top + lanes, highest);
    }
  }

  // Keeps the logits of the targets that are in the strip; `targets` are those of the block.
  void keep_own(const Strip& strip, const int32_t* targets, int64_t num) {
    for (int64_t i = 0; i < min_of(kTileColumns, num - strip.column); ++i) {
      const int64_t j = targets[strip.column + i] - strip.first;
      if (j >= 0 && j < strip.count) own[strip.column + i] = strip.at(j)[i];
    }
  }

  float loss(int64_t i) const { return top[i] - own[i] + std::log(total[i]); }
};

// Sum of a side's weighted unit vectors -> gradient of vector i of the other side, [width].
void write_gradient(const Side& side, int64_t i, float* sum, float* out) {
  if (side.inverse_norms != nullptr) through_norm(side.vector(i), side.inverse_norms[i], side.width, sum);
  std::memcpy(out, sum, static_cast<size_t>(side.width) * sizeof(float));
}

// Sum of rows weighted by exponentials -> gradient of the packed query for a unit gradient of the loss.
void finish_query(const Problem& p, int64_t position, float total, const Scratch& s, float* sum) {
  const int64_t target = p.targets[position];
  p.rows.pack(target, target + 1, s.streamed, s.stride);  // as it was added: no rounding is left of equal vectors
  for_vectors(p.rows.width, [&](int64_t c, int) {
    store(sum + c, (load(sum + c) * (1.0f / total) - load(s.streamed + c)) * p.queries.scale);
  });
}

void forward(const Problem& p, float* loss, float* tops, float* totals, float* unit_gradients) {
  const bool summed = unit_gradients != nullptr;
  const int64_t width = p.rows.width;
  parallel_blocks(p.queries.num, held_block(p.queries.num), [&](int64_t begin, int64_t end) {
    const Scratch s = take_scratch<Scratch>(width);
    const int64_t num = end - begin;
    Softmaxes softmaxes;
    stream(
        p.queries, begin, end, p.rows, s,
        [&](const Strip& strip) {
          softmaxes.keep_own(strip, p.targets + begin, num);
          softmaxes.add(strip);
        },
        [&](int64_t count) {
          if (!summed) return;
          for (int64_t i = 0; i < num; ++i) {
            if (softmaxes.decay[i] == 1.0f) continue;
            float* const sum = s.sums + i * s.stride;
            for (int64_t c = 0; c < width; c += kLanes) store(sum + c, load(sum + c) * softmaxes.decay[i]);
          }
          add_tile(s, count, num, width);
        });
    for (int64_t i = 0; i < num; ++i) {
      loss[begin + i] = softmaxes.loss(i);
      tops[begin + i] = softmaxes.top[i];
      totals[begin + i] = softmaxes.total[i];
      if (!summed) continue;
      float* const sum = s.sums + i * s.stride;
      finish_query(p, begin + i, softmaxes.total[i], s, sum);
      write_gradient(p.queries, begin + i, sum, unit_gradients + (begin + i) * width);
    }
  });
}

// Turns the logits of held rows from `begin` into gradients of the logits.
TURBOGR_OUTLINE void weigh_rows(const Problem& p, const Strip& strip, int64_t begin, const float* grad_loss,
                                const float* tops, const float* totals) {
  for (int64_t j = 0; j < strip.count; ++j) {
    const int64_t position = strip.first + j;
    float* const weights = strip.at(j);
    const float grad = grad_loss[position], top = tops[position], scale = grad / totals[position];
    for (int64_t c = 0; c < kTileColumns; c += kLanes) {
      store(weights + c, weight_of(load(weights + c) - top) * scale);
    }
    const int64_t own = p.targets[position] - begin - strip.column;
    if (own >= 0 && own < kTileColumns) weights[own] -= grad;
  }
}

void backward_to_rows(const Problem& p, const float* grad_loss, const float* tops, const float* totals,
                      float* grad_rows) {
  const int64_t width = p.rows.width;
  parallel_blocks(p.rows.num, held_block(p.rows.num), [&](int64_t begin, int64_t end) {
    const Scratch s = take_scratch<Scratch>(width);
    stream(
        p.rows, begin, end, p.queries, s,
        [&](const Strip& strip) { weigh_rows(p, strip, begin, grad_loss, tops, totals); },
        [&](int64_t count) { add_tile(s, count, end - begin, width); });
    for (int64_t i = begin; i < end; ++i) {
      write_gradient(p.rows, i, s.sums + (i - begin) * s.stride, grad_rows + i * width);
    }
  });
}

}  // namespace

// Outputs for the backward: inverse norms (null if vectors are not to be scaled to unit length), the highest logit of
// each position and the sum of its exponentials relative to it. `unit_gradients` [T, width], the
// gradients of the queries for unit gradients of the loss, may be null.
TURBOGR_KERNEL(full_softmax_forward)
(const float* queries, const float* rows, const int32_t* targets, float* inverse_queries, float* inverse_rows,
 float* loss, float* tops, float* totals, float* unit_gradients, int64_t num_positions, int64_t num_rows, int64_t width,
 float inverse_temperature) {
  if (inverse_queries != nullptr) write_inverse_norms(queries, num_positions, width, inverse_queries);
  if (inverse_rows != nullptr) write_inverse_norms(rows, num_rows, width, inverse_rows);
  const Problem p{{queries, inverse_queries, inverse_temperature, num_positions, width},
                  {rows, inverse_rows, 1.0f, num_rows, width},
                  targets};
  forward(p, loss, tops, totals, unit_gradients);
  return kOk;
}

// The gradient of the rows; that of the queries is the forward's unit gradients times `grad_loss`.
TURBOGR_KERNEL(full_softmax_backward)
(const float* grad_loss, const float* queries, const float* rows, const int32_t* targets, const float* inverse_queries,
 const float* inverse_rows, const float* tops, const float* totals, float* grad_rows, int64_t num_positions,
 int64_t num_rows, int64_t width, float inverse_temperature) {
  const Problem p{{queries, inverse_queries, inverse_temperature, num_positions, width},
                  {rows, inverse_rows, 1.0f, num_rows, width},
                  targets};
  backward_to_rows(p, grad_loss, tops, totals, grad_rows);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
