// The update of one segment, once for all instruction sets: V supplies vectors, this file the arithmetic.
//
// Every element goes through the same operations whether it sits in the body or in the tail of a segment, so a result
// depends neither on alignment nor on how a job is cut among threads.
//
// Each translation unit that includes this is compiled for its own instruction set: everything is in an anonymous
// namespace and no inline function of the standard library is used, or the linker could keep the AVX-512 copy of a shared
// one and run it on a processor without AVX-512.
#pragma once

#include "plan.h"
#include "replay.h"

// Left to itself, GCC keeps some of the loops below as functions and reloads their constants for every tile.
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

using stallfree::Plan;
using stallfree::Segment;
using stallfree::Step;

struct BF16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

// A segment is worked on tile by tile. A window's state stays in L1 cache for all of its slots, and every slot's pass reads a
// short run of that slot's gradient: few streams are open in memory at a time, however many slots there are. (State in
// registers and all slots per vector reads as many streams as slots at once: 8 of them at a third of the bandwidth.)
constexpr int kTile = 128;

// Hardware prefetchers lose a stream between two of its tiles, and at every page.
constexpr int kPrefetchDistance = 4 * kTile;

struct alignas(64) Tile {
  float master[kTile], exp_avg[kTile], exp_avg_sq[kTile];
};

template <class T>
ALWAYS_INLINE void prefetch_tile(const T* p) {
  for (int i = 0; i < kTile; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(p + i);
}

// 32 random bits for an element: its index hashed with a key added before and between the rounds of a 32-bit mixer.
// exp_avg takes the low 16 bits, exp_avg_sq the high 16. replay.py defines the same function on tensors.
template <class V>
ALWAYS_INLINE typename V::Int random_bits(uint32_t index, const Segment& segment) {
  typename V::Int x = V::bit_xor(V::counting_from(index), V::set1(segment.stream0));
  x = V::bit_xor(x, V::template shift_right<16>(x));
  x = V::add(V::mul(x, V::set1(0x21f0aaadu)), V::set1(segment.stream1));
  x = V::bit_xor(x, V::template shift_right<15>(x));
  x = V::mul(x, V::set1(0xd35a2d97u));
  return V::bit_xor(x, V::template shift_right<15>(x));
}

template <class V, class Lanes>
ALWAYS_INLINE void store_moments(float* exp_avg, float* exp_avg_sq, typename V::Float m, typename V::Float v, uint32_t,
                                 const Segment&, Lanes lanes) {
  V::store(exp_avg, m, lanes);
  V::store(exp_avg_sq, v, lanes);
}

template <class V, class Lanes>
ALWAYS_INLINE void store_moments(BF16* exp_avg, BF16* exp_avg_sq, typename V::Float m, typename V::Float v, uint32_t index,
                                 const Segment& segment, Lanes lanes) {
  const typename V::Int bits = random_bits<V>(index, segment);
  V::store_stochastic(exp_avg, m, V::bit_and(bits, V::set1(0xffffu)), lanes);
  V::store_stochastic(exp_avg_sq, v, V::template shift_right<16>(bits), lanes);
}

template <class V, class Lanes>
ALWAYS_INLINE void publish(const Plan& plan, int64_t i, typename V::Float value, Lanes lanes) {
  switch (plan.out_dtype) {
    case STALLFREE_F32: V::store(static_cast<float*>(plan.out) + i, value, lanes); break;
    case STALLFREE_BF16: V::store(static_cast<BF16*>(plan.out) + i, value, lanes); break;
    default: V::store(static_cast<F16*>(plan.out) + i, value, lanes); break;
  }
}

// Calls f(i, lanes) for every vector of `count` elements.
template <class V, class F>
ALWAYS_INLINE void for_each_vector(int count, F f) {
  int i = 0;
  for (; i + V::unroll * V::width <= count; i += V::unroll * V::width) {
#pragma GCC unroll 4
    for (int u = 0; u < V::unroll; ++u) f(i + u * V::width, V::all_lanes());
  }
  for (; i + V::width <= count; i += V::width) f(i, V::all_lanes());
  if (i < count) f(i, V::first_lanes(count - i));
}

// One AdamW step on the `count` elements from `offset` of a segment, with the gradients at `grads`. A tile's first pass reads
// the state arrays, its last one writes them and publishes; in between the state is in `tile`.
template <class V, class Grad, class Moment, bool first, bool last>
ALWAYS_INLINE void pass(const Plan& plan, const Segment& segment, const Step& step, const Grad* grads, int64_t offset,
                        int count, Tile& tile) {
  using Float = typename V::Float;
  const int64_t state = segment.state + offset, row = segment.grad + offset;
  float* const master = plan.master + state;
  Moment* const exp_avg = static_cast<Moment*>(plan.exp_avg) + state;
  Moment* const exp_avg_sq = static_cast<Moment*>(plan.exp_avg_sq) + state;
  if constexpr (first) {
    const int64_t beyond = offset + kPrefetchDistance - segment.count;
    const int64_t soon = beyond < 0 ? state + kPrefetchDistance : segment.next + beyond;
    prefetch_tile(plan.master + soon);
    prefetch_tile(static_cast<Moment*>(plan.exp_avg) + soon);
    prefetch_tile(static_cast<Moment*>(plan.exp_avg_sq) + soon);
  }
  const Float beta1 = V::set1(step.beta1), grad_scale = V::set1(step.grad_scale);
  const Float beta2 = V::set1(step.beta2), square_scale = V::set1(step.square_scale);
  const Float decay = V::set1(step.decay), rate = V::set1(step.rate), ahead = V::set1(segment.ahead);
  const typename V::Quotient quotient(step.root_scale, step.eps);
  const bool commit = plan.commit, out = plan.out != nullptr, looks_ahead = segment.ahead != 0.0f;

  for_each_vector<V>(count, [&](int i, auto lanes) __attribute__((always_inline)) {
    const Float g = V::load(grads + i, lanes), root = V::mul(square_scale, g);
    const auto every = V::all_lanes();  // the tile has room for whole vectors
    Float x, m, v;
    if constexpr (first) {
      x = V::load(master + i, lanes);
      m = V::load(exp_avg + i, lanes);
      v = V::load(exp_avg_sq + i, lanes);
    } else {
      x = V::load(tile.master + i, every);
      m = V::load(tile.exp_avg + i, every);
      v = V::load(tile.exp_avg_sq + i, every);
    }
    m = V::fma(beta1, m, V::mul(grad_scale, g));
    v = V::fma(root, root, V::mul(beta2, v));
    const Float q = quotient(m, v);
    x = V::fnma(rate, q, V::mul(decay, x));
    if constexpr (last) {
      if (commit) {
        V::store(master + i, x, lanes);
        store_moments<V>(exp_avg + i, exp_avg_sq + i, m, v, static_cast<uint32_t>(state + i), segment, lanes);
      }
      // Without look-ahead `out` is the master itself, also where q is infinite or x is -0.
      if (out) publish<V>(plan, row + i, looks_ahead ? V::fnma(ahead, q, x) : x, lanes);
    } else {
      V::store(tile.master + i, x, every);
      V::store(tile.exp_avg + i, m, every);
      V::store(tile.exp_avg_sq + i, v, every);
    }
  });
}

// Rule "mean": adds one slot's factor * gradient to the sums. The division by the slots' number is in the step's constants.
template <class V, class Grad>
ALWAYS_INLINE void add_gradient(const Grad* grads, float factor, int count, float* sums) {
  for_each_vector<V>(count, [&](int i, auto lanes) __attribute__((always_inline)) {
    const auto every = V::all_lanes();
    V::store(sums + i, V::fma(V::set1(factor), V::load(grads + i, lanes), V::load(sums + i, every)), every);
  });
}

template <class V, class Grad, class Moment>
void run_segment(const Plan& plan, const Segment& segment) {
  Tile tile;
  for (int64_t offset = 0; offset < segment.count; offset += kTile) {
    const int count = segment.count - offset < kTile ? static_cast<int>(segment.count - offset) : kTile;
    const int64_t row = segment.grad + offset;
    const auto grads = [&](int32_t slot) {
      const Grad* p = static_cast<const Grad*>(plan.grads[slot]) + row;
      prefetch_tile(p + kPrefetchDistance);
      return p;
    };
    const int32_t last = segment.step_count - 1;
    if (plan.slots == 0) {
      for_each_vector<V>(count, [&](int i, auto lanes) __attribute__((always_inline)) {
        publish<V>(plan, row + i, V::load(plan.master + segment.state + offset + i, lanes), lanes);
      });
    } else if (plan.mean) {
      alignas(64) float sums[kTile] = {};
      for (int32_t slot = 0; slot < plan.slots; ++slot) add_gradient<V>(grads(slot), plan.factors[slot], count, sums);
      pass<V, float, Moment, true, true>(plan, segment, segment.steps[0], sums, offset, count, tile);
    } else if (last == 0) {
      pass<V, Grad, Moment, true, true>(plan, segment, segment.steps[0], grads(0), offset, count, tile);
    } else {
      pass<V, Grad, Moment, true, false>(plan, segment, segment.steps[0], grads(0), offset, count, tile);
      for (int32_t k = 1; k < last; ++k) {
        pass<V, Grad, Moment, false, false>(plan, segment, segment.steps[k], grads(k), offset, count, tile);
      }
      pass<V, Grad, Moment, false, true>(plan, segment, segment.steps[last], grads(last), offset, count, tile);
    }
  }
}

}  // namespace

#define STALLFREE_TABLE(V)                                     \
  {{run_segment<V, float, float>, run_segment<V, float, BF16>}, \
   {run_segment<V, BF16, float>, run_segment<V, BF16, BF16>},   \
   {run_segment<V, F16, float>, run_segment<V, F16, BF16>}}
