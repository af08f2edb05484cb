// FuXi's attention: channels of position, time and content, each a weighted sum of the same values, masked alike.
//
// Weights of position and time are the same for all heads: a tile of each is made once and used by every head of the
// group. The time channel is a table over buckets or a decaying function; content is SiLU(q . k) / max_len, if there.

#include "attention.h"
#include "decay_bias.h"
#include "relative_bias.h"
#include "silu_scores.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

struct Fuxi {
  BiasSource times;          // by_distance holds zeros: the bias is the weight of time alone
  const float* by_distance;  // weight of position
  const Decay* decay;        // null: time_weight is a table over buckets
  float scale;
  bool content;
  int64_t num_time_weights = 0;
  double* sums_by_distance = nullptr;
  double* sums_by_time = nullptr;

  struct Tiles {
    BiasTile time;
    DecayTile decay;
    float *position, *scores;

    void layout(Arena& arena) {
      time.layout(arena);
      decay.layout(arena);
      position = arena.take<float>(kBlock * kBlock);
      scores = arena.take<float>(kBlock * kBlock);
    }
  };

  struct ForwardScratch {
    Tiles tiles;
    void layout(Arena& arena, const Shape&, int64_t) { tiles.layout(arena); }
  };

  struct BackwardScratch {
    Tiles tiles;
    BiasGradient bias;
    float *grad_scores, *grad_position, *grad_time;

    void layout(Arena& arena, const Shape&, int64_t num_weights) {
      tiles.layout(arena);
      bias.layout(arena, num_weights);
      grad_scores = arena.take<float>(kBlock * kBlock);
      grad_position = arena.take<float>(kBlock * kBlock);
      grad_time = arena.take<float>(kBlock * kBlock);
    }
  };

  void begin(int64_t, ForwardScratch&) const {}

  template <class Scratch>
  void prepare(const Span& s, Scratch& scratch) const {
    Tiles& tiles = scratch.tiles;
    for (int64_t c = 0; c < s.keys; ++c) {
      for (int64_t r = 0; r < s.rows_padded; r += kLanes) {
        store(tiles.position + c * kBlock + r, load(by_distance + s.place + r - c));
      }
    }
    clear_unseen(s, tiles.position);
    if (decay != nullptr) {
      fill_decay(*decay, s, times.query_times, times.key_times, tiles.decay, tiles.time.bias);
    } else {
      fill_bias(times, s, tiles.time);
    }
    clear_unseen(s, tiles.time.bias);
  }

  void attend(const Span& s, const Shape& shape, const ForwardHead& head, ForwardScratch& scratch) const {
    const Tiles& tiles = scratch.tiles;
    const int64_t ep = shape.e_padded, next = kBlock * ep;  // from channel to channel
    panel_add_by_row(s.keys, s.rows, ep, tiles.position, head.values, head.outputs, s.band);
    panel_add_by_row(s.keys, s.rows, ep, tiles.time.bias, head.values, head.outputs + next, s.band);
    if (!content) return;
    panel_scores(s.keys, s.rows_padded, shape.d, head.keys, head.queries_turned, nullptr, tiles.scores, s.band);
    silu_scores(s, scale, tiles.scores);
    panel_add_by_row(s.keys, s.rows, ep, tiles.scores, head.values, head.outputs + 2 * next, s.band);
  }

  void finish(const Span&, const Shape&, const ForwardHead&, ForwardScratch&) const {}

  float query_scale() const { return 1.0f; }
  float grad_scale(int64_t channel) const { return channel == 2 ? scale : 1.0f; }
  int64_t num_sums() const { return num_time_weights; }

  void begin_task(const AttentionTask& task, int64_t number, BackwardScratch& scratch) const {
    scratch.bias.begin(task, sums_by_distance, sums_by_time + number * num_time_weights);
  }

  void begin_rows(const Span&, const Shape&, BackwardScratch&, int64_t, int64_t) const {}

  void attend_backward(const Span& s, const Shape& shape, const BackwardHead& head, BackwardScratch& scratch) const {
    const Tiles& tiles = scratch.tiles;
    const int64_t dp = shape.d_padded, ep = shape.e_padded, next = kBlock * ep, turned = shape.e * kBlock;
    // Gradients of the shared weights add up over the heads.
    const bool first = head.slot == 0;
    panel_scores(s.keys, s.rows_padded, shape.e, head.values, head.grads_turned,
                 first ? nullptr : scratch.grad_position, scratch.grad_position, s.band);
    panel_scores(s.keys, s.rows_padded, shape.e, head.values, head.grads_turned + turned,
                 first ? nullptr : scratch.grad_time, scratch.grad_time, s.band);
    panel_add_by_key(s.keys, s.rows, ep, tiles.position, head.grads, head.grad_values, s.band);
    panel_add_by_key(s.keys, s.rows, ep, tiles.time.bias, head.grads + next, head.grad_values, s.band);
    if (!content) return;
    panel_scores(s.keys, s.rows_padded, shape.d, head.keys, head.queries_turned, nullptr, tiles.scores, s.band);
    panel_scores(s.keys, s.rows_padded, shape.e, head.values, head.grads_turned + 2 * turned, nullptr,
                 scratch.grad_scores, s.band);
    silu_scores_backward(s, tiles.scores, scratch.grad_scores, nullptr, Total::kNone);
    panel_add_by_key(s.keys, s.rows, ep, tiles.scores, head.grads + 2 * next, head.grad_values, s.band);
    panel_add_by_key(s.keys, s.rows, dp, scratch.grad_scores, head.queries, head.grad_keys, s.band);
    panel_add_by_row(s.keys, s.rows, dp, scratch.grad_scores, head.keys, head.grad_queries, s.band);
  }

  void finish_tile(const Span& s, BackwardScratch& scratch) const {
    clear_unseen(s, scratch.grad_position);
    clear_unseen(s, scratch.grad_time);
    add_by_distance(s, scratch.grad_position, scratch.bias);
    if (decay != nullptr) {
      add_decay_gradient(*decay, s, scratch.grad_time, scratch.tiles.decay, scratch.bias.by_bucket);
    } else {
      add_by_bucket(s, scratch.grad_time, scratch.tiles.time, scratch.bias);
    }
  }
};

}  // namespace

// `form` is a TimeForm, whose parameters time_weight holds. Null q and k, with d = 0, leave content out. The last
// argument is HSTU's alpha and has no meaning here.
TURBOGR_KERNEL(fuxi_forward)
(const float* q, const float* k, const float* v, const int64_t* offsets, const int64_t* first, const int64_t* last,
 const int64_t* query_times, const int64_t* key_times, const float* position_weight, const float* time_weight,
 const int64_t* boundaries, float* out, int64_t num_sequences, int64_t num_tokens, int64_t heads, int64_t d, int64_t e,
 int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t max_len, int64_t num_time_weights, int64_t form, float) {
  const bool content = q != nullptr;
  const Shape shape(heads, d, e, content ? 3 : 2);
  const Mask mask({first, last}, offsets, num_sequences, num_tokens);
  if (!mask) return kOutOfMemory;
  const AttentionPlan plan(mask, offsets, num_sequences, num_tokens, heads, shape.group, shape.rows_per_task());
  ByDistance by_distance(position_weight, max_len, mask), zeros(nullptr, max_len, mask);
  if (!plan || !by_distance || !zeros) return kOutOfMemory;
  const TimeBuckets buckets(boundaries, form != kTable ? 0 : num_time_weights - 1);
  const Decay decay = decay_of(form, time_weight);
  const AttentionInputs in{q, k, v, q_stride, k_stride, v_stride};
  const Fuxi kind{{query_times, key_times, zeros.data(), time_weight, &buckets},
                  by_distance.data(),
                  form != kTable ? &decay : nullptr,
                  1.0f / static_cast<float>(max_len),
                  content};
  return run_forward(plan, shape, in, offsets, num_sequences, mask, kind, out);
}

TURBOGR_KERNEL(fuxi_backward)
(const float* grad_out, const float* q, const float* k, const float* v, const int64_t* offsets, const int64_t* first,
 const int64_t* last, const int64_t* query_times, const int64_t* key_times, const float* position_weight,
 const float* time_weight, const int64_t* boundaries, float* grad_q, float* grad_k, float* grad_v,
 float* grad_position_weight, float* grad_time_weight, int64_t num_sequences, int64_t num_tokens, int64_t heads,
 int64_t d, int64_t e, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t max_len, int64_t num_time_weights,
 int64_t form, float) {
  const bool content = q != nullptr;
  const Shape shape(heads, d, e, content ? 3 : 2);
  const Mask mask({first, last}, offsets, num_sequences, num_tokens);
  if (!mask) return kOutOfMemory;
  const AttentionPlan plan(mask, offsets, num_sequences, heads, shape.group);
  ByDistance by_distance(position_weight, max_len, mask), zeros(nullptr, max_len, mask);
  if (!plan || !by_distance || !zeros) return kOutOfMemory;
  Buffer<float> partial_q(content ? plan.partial_rows * heads * d : 0);
  Buffer<double> sums_by_distance(plan.distances);
  Buffer<double> sums_by_time(plan.size() * num_time_weights);
  if (!partial_q || !sums_by_distance || !sums_by_time) return kOutOfMemory;
  const TimeBuckets buckets(boundaries, form != kTable ? 0 : num_time_weights - 1);
  const Decay decay = decay_of(form, time_weight);
  const AttentionInputs in{q, k, v, q_stride, k_stride, v_stride};
  const AttentionGradients grads{grad_out, grad_q, grad_k, grad_v, heads * d, heads * d, heads * e, partial_q.data()};
  const Fuxi kind{{query_times, key_times, zeros.data(), time_weight, &buckets},
                  by_distance.data(),
                  form != kTable ? &decay : nullptr,
                  1.0f / static_cast<float>(max_len),
                  content,
                  num_time_weights,
                  sums_by_distance.data(),
                  sums_by_time.data()};
  parallel_tasks(plan.size(), [&](int64_t i) { backward_task(plan[i], i, shape, in, grads, mask, kind); });
  if (content) add_partial_queries(plan, shape, grads);
  reduce_by_distance(plan, sums_by_distance.data(), max_len, grad_position_weight);
  reduce_tasks(plan, sums_by_time.data(), num_time_weights, grad_time_weight);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
