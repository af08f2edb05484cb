// Retention: out_i = sum over j <= i of (q_i . k_j) * exp(-decay * (i - j + 1)) * v_j, in time linear in the length.
//
// A sequence is cut into chunks. Within a chunk pairs are multiplied out; what lies before it is one matrix per head,
// state = sum over j of exp(-decay * (start - j)) * k_j v_j^T. The backward walks the chunks back with the gradient of
// that matrix, on states that a forward walk has kept. A task is a head of a sequence and works on its own, so nothing
// depends on the number of threads.

#include <cmath>

#include "tile_gemm.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

constexpr int64_t kChunk = 48;
static_assert(kChunk % kTileRows == 0 && kChunk % kLanes == 0, "chunks must hold whole micro-tiles");

// c[m][n] (+)= sum over k < depth of a(m, k) * b[k][n]. Rows of `a` and `c` must exist up to a whole micro-tile,
// columns are a multiple of kLanes. With `kTransposed`, a(m, k) is a[k * lda + m]. Row m uses k in [begin(m), end(m))
// of its micro-tile: `lower` leaves out what lies above the diagonal (k > m), `upper` what lies below it (k < m).
enum class Part { kAll, kLower, kUpper };

template <bool kTransposed>
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
              float* c, int64_t ldc, bool add, Part part = Part::kAll) {
  for (int64_t m = 0; m < rows; m += kTileRows) {
    const int64_t begin = part == Part::kUpper ? min_of(m, depth) : 0;
    const int64_t end = part == Part::kLower ? min_of(depth, m + kTileRows) : depth;
    const float* const from = kTransposed ? a + m : a + m * lda;
    int64_t n = 0;
    for (; n + kTileColumns <= columns; n += kTileColumns) {
      float* const to = c + m * ldc + n;
      micro_tile<kTileRows, kTileVectors, kTransposed>(begin, end, from, lda, b + n, ldb, add ? to : nullptr, ldc, to,
                                                       ldc);
    }
    if (n < columns) {
      float* const to = c + m * ldc + n;
      micro_tile<kTileRows, 1, kTransposed>(begin, end, from, lda, b + n, ldb, add ? to : nullptr, ldc, to, ldc);
    }
  }
}

// Sizes of a head: rows of q, k and v take dp and ep floats, of which the first dc and ec are whole vectors; all rows
// of micro-tiles fit into dp and ep.
struct Head {
  int64_t d, e, dc, ec, dp, ep, dr;
  Head(int64_t d_, int64_t e_)
      : d(d_),
        e(e_),
        dc(round_up(d_, kLanes)),
        ec(round_up(e_, kLanes)),
        dp(round_up(max_of(dc, round_up(d_, kTileRows)), kLanes)),
        ep(round_up(max_of(ec, round_up(e_, kTileRows)), kLanes)),
        dr(round_up(d_, kTileRows)) {}
  int64_t state() const { return max_of(dr, dp) * ep; }
};

// Copies `count` rows of n floats to rows of `ld` and fills up with zeros, to kChunk rows.
void pack(const float* src, int64_t stride, int64_t count, int64_t n, float* dst, int64_t ld) {
  std::memset(dst, 0, static_cast<size_t>(kChunk * ld) * sizeof(float));
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(dst + i * ld, src + i * stride, static_cast<size_t>(n) * sizeof(float));
}

void transpose(const float* src, int64_t rows, int64_t columns, int64_t ld, float* dst, int64_t ld_out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) dst[c * ld_out + r] = src[r * ld + c];
  }
}

void scale_row(const float* src, float by, int64_t n, float* dst) {
  for (int64_t c = 0; c < n; c += kLanes) store(dst + c, load(src + c) * by);
}

// power[n] = exp(-decay * n), up to kChunk.
void fill_powers(float decay, float* power) {
  for (int64_t n = 0; n <= kChunk; ++n) power[n] = static_cast<float>(std::exp(-double(decay) * double(n)));
}

// What is in a chunk: q, k, v as they are, k turned, and the matrix of scores q_i . k_j, [kChunk][kChunk].
struct Chunk {
  float *q, *k, *v, *turned, *scores, *scaled, *power;

  void layout(Arena& arena, const Head& head) {
    q = arena.take<float>(kChunk * head.dp);
    k = arena.take<float>(kChunk * head.dp);
    v = arena.take<float>(kChunk * head.ep);
    turned = arena.take<float>(max_of(head.dp, head.ep) * kChunk);
    scores = arena.take<float>(kChunk * kChunk);
    scaled = arena.take<float>(kChunk * max_of(head.dp, head.ep));
    power = arena.take<float>(kChunk + 1);
  }

  void load_keys(const float* keys, int64_t k_stride, const float* values, int64_t v_stride, int64_t count,
                 const Head& head) const {
    pack(keys, k_stride, count, head.d, k, head.dp);
    pack(values, v_stride, count, head.e, v, head.ep);
  }

  // scores[i][j] for j <= i, else what must not be used.
  void score(const Head& head) const {
    std::memset(turned, 0, static_cast<size_t>(head.dp * kChunk) * sizeof(float));
    transpose(k, kChunk, head.d, head.dp, turned, kChunk);
    multiply<false>(kChunk, kChunk, head.d, q, head.dp, turned, kChunk, scores, kChunk, false);
  }

  // state = power[count] * state + sum over j of power[count - j] * k_j v_j^T
  void advance(int64_t count, const Head& head, float* state) const {
    const float last = power[count];
    for (int64_t at = 0; at < head.state(); at += kLanes) store(state + at, load(state + at) * last);
    std::memset(scaled, 0, static_cast<size_t>(kChunk * head.dp) * sizeof(float));
    for (int64_t j = 0; j < count; ++j) scale_row(k + j * head.dp, power[count - j], head.dp, scaled + j * head.dp);
    multiply<true>(head.dr, head.ec, count, scaled, head.dp, v, head.ep, state, head.ep, true);
  }
};

struct ForwardScratch {
  Chunk chunk;
  float *state, *out;
  void layout(Arena& arena, const Head& head) {
    chunk.layout(arena, head);
    state = arena.take<float>(head.state());
    out = arena.take<float>(kChunk * head.ep);
  }
};

struct BackwardScratch {
  Chunk chunk;
  float *states, *grad_state, *turned_state, *grad, *grad_scores, *grad_q, *grad_k, *grad_v;
  void layout(Arena& arena, const Head& head, int64_t num_chunks) {
    chunk.layout(arena, head);
    states = arena.take<float>(num_chunks * head.state());
    grad_state = arena.take<float>(head.state());
    turned_state = arena.take<float>(head.ep * head.dp);
    grad = arena.take<float>(kChunk * head.ep);
    grad_scores = arena.take<float>(kChunk * kChunk);
    grad_q = arena.take<float>(kChunk * head.dp);
    grad_k = arena.take<float>(kChunk * head.dp);
    grad_v = arena.take<float>(kChunk * head.ep);
  }
};

double dot(const float* a, const float* b, int64_t n) {
  vf total{};
  for (int64_t c = 0; c < n; c += kLanes) total += load(a + c) * load(b + c);
  return static_cast<double>(sum(total));
}

void clear(float* x, int64_t n) { std::memset(x, 0, static_cast<size_t>(n) * sizeof(float)); }

}  // namespace

// q, k [T, heads, d] and v [T, heads, e], tokens a stride apart; decay [heads]; out [T, heads, e].
TURBOGR_KERNEL(retention)
(const float* q, const float* k, const float* v, const int64_t* offsets, const float* decay, float* out,
 int64_t num_sequences, int64_t heads, int64_t d, int64_t e, int64_t q_stride, int64_t k_stride, int64_t v_stride) {
  const Head head(d, e);
  parallel_tasks(num_sequences * heads, [&](int64_t task) {
    const int64_t sequence = task / heads, h = task % heads;
    const int64_t begin = offsets[sequence], end = offsets[sequence + 1];
    if (begin == end) return;
    const ForwardScratch scratch = take_scratch<ForwardScratch>(head);
    const Chunk& chunk = scratch.chunk;
    fill_powers(decay[h], chunk.power);
    clear(scratch.state, head.state());
    for (int64_t start = begin; start < end; start += kChunk) {
      const int64_t count = min_of(kChunk, end - start);
      pack(q + start * q_stride + h * d, q_stride, count, d, chunk.q, head.dp);
      chunk.load_keys(k + start * k_stride + h * d, k_stride, v + start * v_stride + h * e, v_stride, count, head);
      chunk.score(head);
      for (int64_t i = 0; i < kChunk; ++i) {
        float* const row = chunk.scores + i * kChunk;
        for (int64_t j = 0; j <= i; ++j) row[j] *= chunk.power[i - j + 1];
        clear(row + i + 1, kChunk - i - 1);
      }
      multiply<false>(kChunk, head.ec, count, chunk.scores, kChunk, chunk.v, head.ep, scratch.out, head.ep, false,
                      Part::kLower);
      if (start > begin) {
        for (int64_t i = 0; i < kChunk; ++i) {
          scale_row(chunk.q + i * head.dp, chunk.power[i + 1], head.dp, chunk.scaled + i * head.dp);
        }
        multiply<false>(kChunk, head.ec, d, chunk.scaled, head.dp, scratch.state, head.ep, scratch.out, head.ep, true);
      }
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(out + ((start + i) * heads + h) * e, scratch.out + i * head.ep,
                    static_cast<size_t>(e) * sizeof(float));
      }
      if (start + count < end) chunk.advance(count, head, scratch.state);
    }
  });
  return kOk;
}

// From grad_out [T, heads, e]: grad_q, grad_k [T, heads, d], grad_v [T, heads, e] and grad_decay [heads].
TURBOGR_KERNEL(retention_backward)
(const float* grad_out, const float* q, const float* k, const float* v, const int64_t* offsets, const float* decay,
 float* grad_q, float* grad_k, float* grad_v, float* grad_decay, int64_t num_sequences, int64_t heads, int64_t d,
 int64_t e, int64_t q_stride, int64_t k_stride, int64_t v_stride) {
  const Head head(d, e);
  Buffer<double> sums(num_sequences * heads);  // gradients of `decay`
  if (!sums) return kOutOfMemory;
  parallel_tasks(num_sequences * heads, [&](int64_t task) {
    const int64_t sequence = task / heads, h = task % heads;
    const int64_t begin = offsets[sequence], end = offsets[sequence + 1];
    double by_decay = 0.0;
    sums[task] = 0.0;
    if (begin == end) return;
    const int64_t num_chunks = ceil_div(end - begin, kChunk);
    const BackwardScratch scratch = take_scratch<BackwardScratch>(head, num_chunks);
    const Chunk& chunk = scratch.chunk;
    const float* const power = chunk.power;
    fill_powers(decay[h], chunk.power);
    clear(scratch.states, head.state());
    for (int64_t number = 0; number + 1 < num_chunks; ++number) {
      const int64_t start = begin + number * kChunk;
      chunk.load_keys(k + start * k_stride + h * d, k_stride, v + start * v_stride + h * e, v_stride, kChunk, head);
      float* const next = scratch.states + (number + 1) * head.state();
      std::memcpy(next, scratch.states + number * head.state(), static_cast<size_t>(head.state()) * sizeof(float));
      chunk.advance(kChunk, head, next);
    }
    clear(scratch.grad_state, head.state());
    for (int64_t number = num_chunks - 1; number >= 0; --number) {
      const int64_t start = begin + number * kChunk, count = min_of(kChunk, end - start);
      const float* const state = scratch.states + number * head.state();
      const bool is_last = number + 1 == num_chunks;
      pack(q + start * q_stride + h * d, q_stride, count, d, chunk.q, head.dp);
      chunk.load_keys(k + start * k_stride + h * d, k_stride, v + start * v_stride + h * e, v_stride, count, head);
      pack(grad_out + (start * heads + h) * e, heads * e, count, e, scratch.grad, head.ep);

      // Pairs within the chunk.
      chunk.score(head);
      clear(chunk.turned, head.ep * kChunk);
      transpose(chunk.v, kChunk, e, head.ep, chunk.turned, kChunk);
      multiply<false>(kChunk, kChunk, e, scratch.grad, head.ep, chunk.turned, kChunk, scratch.grad_scores, kChunk,
                      false);
      for (int64_t i = 0; i < kChunk; ++i) {
        float* const row = chunk.scores + i * kChunk;
        float* const grad_row = scratch.grad_scores + i * kChunk;
        double along = 0.0;
        for (int64_t j = 0; j <= i; ++j) {
          grad_row[j] *= power[i - j + 1];
          along += double(grad_row[j] * row[j]) * double(i - j + 1);
          row[j] *= power[i - j + 1];
        }
        by_decay -= along;
        clear(row + i + 1, kChunk - i - 1);
        clear(grad_row + i + 1, kChunk - i - 1);
      }
      multiply<true>(kChunk, head.ec, count, chunk.scores, kChunk, scratch.grad, head.ep, scratch.grad_v, head.ep,
                     false, Part::kUpper);
      multiply<false>(kChunk, head.dc, count, scratch.grad_scores, kChunk, chunk.k, head.dp, scratch.grad_q, head.dp,
                      false, Part::kLower);
      multiply<true>(kChunk, head.dc, count, scratch.grad_scores, kChunk, chunk.q, head.dp, scratch.grad_k, head.dp,
                     false, Part::kUpper);

      // What the chunk reads of the state before it.
      if (number > 0) {
        clear(scratch.turned_state, head.ep * head.dp);
        transpose(state, d, e, head.ep, scratch.turned_state, head.dp);
        multiply<false>(kChunk, head.dc, e, scratch.grad, head.ep, scratch.turned_state, head.dp, chunk.scaled, head.dp,
                        false);
        for (int64_t i = 0; i < count; ++i) {
          float* const from = chunk.scaled + i * head.dp;
          scale_row(from, power[i + 1], head.dc, from);
          by_decay -= double(i + 1) * dot(from, chunk.q + i * head.dp, head.dc);
          float* const to = scratch.grad_q + i * head.dp;
          for (int64_t c = 0; c < head.dc; c += kLanes) store(to + c, load(to + c) + load(from + c));
        }
      }
      // What it adds to the state after it, whose gradient is grad_state.
      if (!is_last) {
        clear(scratch.turned_state, head.ep * head.dp);
        transpose(scratch.grad_state, d, e, head.ep, scratch.turned_state, head.dp);
        multiply<false>(kChunk, head.dc, e, chunk.v, head.ep, scratch.turned_state, head.dp, chunk.scaled, head.dp,
                        false);
        for (int64_t j = 0; j < count; ++j) {
          float* const from = chunk.scaled + j * head.dp;
          scale_row(from, power[count - j], head.dc, from);
          by_decay -= double(count - j) * dot(from, chunk.k + j * head.dp, head.dc);
          float* const to = scratch.grad_k + j * head.dp;
          for (int64_t c = 0; c < head.dc; c += kLanes) store(to + c, load(to + c) + load(from + c));
        }
        for (int64_t j = 0; j < kChunk; ++j) {
          scale_row(chunk.k + j * head.dp, j < count ? power[count - j] : 0.0f, head.dp, chunk.scaled + j * head.dp);
        }
        multiply<false>(kChunk, head.ec, d, chunk.scaled, head.dp, scratch.grad_state, head.ep, scratch.grad_v, head.ep,
                        true);
        by_decay -= double(count) * double(power[count]) * dot(scratch.grad_state, state, head.state());
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = (start + i) * heads + h;
        std::memcpy(grad_q + at * d, scratch.grad_q + i * head.dp, static_cast<size_t>(d) * sizeof(float));
        std::memcpy(grad_k + at * d, scratch.grad_k + i * head.dp, static_cast<size_t>(d) * sizeof(float));
        std::memcpy(grad_v + at * e, scratch.grad_v + i * head.ep, static_cast<size_t>(e) * sizeof(float));
      }
      // The gradient of the state before the chunk.
      if (number == 0) break;
      for (int64_t at = 0; at < head.state(); at += kLanes) {
        store(scratch.grad_state + at, load(scratch.grad_state + at) * power[count]);
      }
      for (int64_t i = 0; i < kChunk; ++i) {
        scale_row(chunk.q + i * head.dp, power[i + 1], head.dp, chunk.scaled + i * head.dp);
      }
      multiply<true>(head.dr, head.ec, count, chunk.scaled, head.dp, scratch.grad, head.ep, scratch.grad_state, head.ep,
                     true);
    }
    sums[task] = by_decay;
  });
  for (int64_t h = 0; h < heads; ++h) {
    double total = 0.0;
    for (int64_t s = 0; s < num_sequences; ++s) total += sums[s * heads + h];
    grad_decay[h] = static_cast<float>(total);
  }
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
