// Attention by the phase of times: with angles a_i of queries and b_j of keys and a decay over the time between them,
//
//   out_i = sum over j <= i of sin(a_i - b_j) * exp(log_decay * (gap_j + ... + gap_i)) * v_j
//
// for the first half of the heads, and the same with cos for the second half. Sine and cosine of a difference are sums
// of products, so two running vectors per head, s = sum of cos(b_j) v_j and of sin(b_j) v_j with their decay, hold all
// that came before: time is linear in the length. A task is a period of a sequence, so nothing depends on the threads.

#include <cmath>

#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

// Two vectors of `width` floats for each token: the decayed sums with the cosine and with the sine of the keys' angles.
struct Scratch {
  float *sums, *grads;
  void layout(Arena& arena, int64_t tokens, int64_t width) {
    sums = arena.take<float>(tokens * 2 * width);
    grads = arena.take<float>(2 * width);
  }
};

struct Angle {
  float sine, cosine;
};

}  // namespace

// v and out [T, 2 * periods, e]; query_turns, key_turns [T, periods, 2]: sine and cosine; gaps [T, periods].
TURBOGR_KERNEL(periodic_attention)
(const float* v, const float* query_turns, const float* key_turns, const float* gaps, const float* log_decay,
 const int64_t* offsets, float* out, int64_t num_sequences, int64_t periods, int64_t e, int64_t v_stride) {
  const int64_t width = round_up(e, kLanes);
  parallel_tasks(num_sequences * periods, [&](int64_t task) {
    const int64_t sequence = task / periods, g = task % periods;
    const int64_t begin = offsets[sequence], end = offsets[sequence + 1];
    const Scratch scratch = take_scratch<Scratch>(int64_t(2), width);
    float* const state = scratch.sums;  // of the head of sines, then of that of cosines: by cosine, by sine
    std::memset(state, 0, static_cast<size_t>(4 * width) * sizeof(float));
    for (int64_t i = begin; i < end; ++i) {
      const Angle query{query_turns[(i * periods + g) * 2], query_turns[(i * periods + g) * 2 + 1]};
      const Angle key{key_turns[(i * periods + g) * 2], key_turns[(i * periods + g) * 2 + 1]};
      const float decay = std::exp(log_decay[g] * gaps[i * periods + g]);
      for (int64_t half = 0; half < 2; ++half) {
        const float* const value = v + i * v_stride + (half * periods + g) * e;
        float* const to = out + (i * 2 * periods + half * periods + g) * e;
        float* const by_cosine = state + 2 * half * width;
        float* const by_sine = by_cosine + width;
        for_vectors(e, [&](int64_t c, int count) {
          const vf x = load_some(value + c, count);
          const vf with_cosine = (load(by_cosine + c) + x * key.cosine) * decay;
          const vf with_sine = (load(by_sine + c) + x * key.sine) * decay;
          store(by_cosine + c, with_cosine);
          store(by_sine + c, with_sine);
          store_some(to + c,
                     half == 0 ? with_cosine * query.sine - with_sine * query.cosine
                               : with_cosine * query.cosine + with_sine * query.sine,
                     count);
        });
      }
    }
  });
  return kOk;
}

// From grad_out [T, 2 * periods, e]: grad_v of the same shape, and grad_log_decay [periods].
TURBOGR_KERNEL(periodic_attention_backward)
(const float* grad_out, const float* v, const float* query_turns, const float* key_turns, const float* gaps,
 const float* log_decay, const int64_t* offsets, float* grad_v, float* grad_log_decay, int64_t num_sequences,
 int64_t periods, int64_t e, int64_t v_stride) {
  const int64_t width = round_up(e, kLanes);
  Buffer<double> totals(num_sequences * periods);
  if (!totals) return kOutOfMemory;
  parallel_tasks(num_sequences * periods, [&](int64_t task) {
    const int64_t sequence = task / periods, g = task % periods;
    const int64_t begin = offsets[sequence], end = offsets[sequence + 1];
    totals[task] = 0.0;
    if (begin == end) return;
    const Scratch scratch = take_scratch<Scratch>(end - begin, width);
    const auto decay_of = [&](int64_t i) { return std::exp(log_decay[g] * gaps[i * periods + g]); };
    double total = 0.0;
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t head = half * periods + g;
      // Forward again: the sums after every token.
      for (int64_t i = begin; i < end; ++i) {
        const Angle key{key_turns[(i * periods + g) * 2], key_turns[(i * periods + g) * 2 + 1]};
        const float decay = decay_of(i);
        float* const now = scratch.sums + (i - begin) * 2 * width;
        const float* const before = now - 2 * width;
        const float* const value = v + i * v_stride + head * e;
        for_vectors(e, [&](int64_t c, int count) {
          const vf x = load_some(value + c, count);
          const vf with_cosine = i > begin ? load(before + c) : vf{};
          const vf with_sine = i > begin ? load(before + width + c) : vf{};
          store(now + c, (with_cosine + x * key.cosine) * decay);
          store(now + width + c, (with_sine + x * key.sine) * decay);
        });
      }
      // Back: `grads` is the gradient of the sums after token i.
      float* const grads = scratch.grads;
      std::memset(grads, 0, static_cast<size_t>(2 * width) * sizeof(float));
      for (int64_t i = end - 1; i >= begin; --i) {
        const Angle query{query_turns[(i * periods + g) * 2], query_turns[(i * periods + g) * 2 + 1]};
        const Angle key{key_turns[(i * periods + g) * 2], key_turns[(i * periods + g) * 2 + 1]};
        const float decay = decay_of(i);
        const float* const now = scratch.sums + (i - begin) * 2 * width;
        const float* const grad = grad_out + (i * 2 * periods + head) * e;
        float* const to = grad_v + (i * 2 * periods + head) * e;
        vf along{};
        for_vectors(e, [&](int64_t c, int count) {
          const vf y = load_some(grad + c, count);
          vf with_cosine = load(grads + c) + y * (half == 0 ? query.sine : query.cosine);
          vf with_sine = load(grads + width + c) + y * (half == 0 ? -query.cosine : query.sine);
          along += with_cosine * load(now + c) + with_sine * load(now + width + c);
          with_cosine *= decay;
          with_sine *= decay;
          store(grads + c, with_cosine);
          store(grads + width + c, with_sine);
          store_some(to + c, with_cosine * key.cosine + with_sine * key.sine, count);
        });
        total += static_cast<double>(sum(along)) * static_cast<double>(gaps[i * periods + g]);
      }
    }
    totals[task] = total;
  });
  for (int64_t g = 0; g < periods; ++g) {
    double total = 0.0;
    for (int64_t s = 0; s < num_sequences; ++s) total += totals[s * periods + g];
    grad_log_decay[g] = static_cast<float>(total);
  }
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
