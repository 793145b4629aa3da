// The update of one segment, once for all instruction sets: V supplies vectors (lanes_*.h), this file the arithmetic.
//
// Every element goes through the same operations whether it sits in the body or in the tail of a segment, so a result
// depends neither on alignment nor on how a job is cut among threads. State stays in registers for the whole window.
//
// Each translation unit that includes this is compiled for its own instruction set: everything is in an anonymous
// namespace and no inline function of the standard library is used, or the linker could keep the AVX-512 copy of a shared
// one and run it on a processor without AVX-512.
#pragma once

#include "plan.h"
#include "replay.h"

namespace {

struct BF16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

constexpr uint32_t kMix1 = 0x21f0aaadu, kMix2 = 0xd35a2d97u;

// 32 random bits for an element: its index hashed with a key added before and between the rounds of a 32-bit mixer.
// exp_avg takes the low 16 bits, exp_avg_sq the high 16. replay.py defines the same function on tensors.
template <class V>
inline typename V::Int random_bits(uint32_t index, uint32_t stream0, uint32_t stream1) {
  typename V::Int x = V::bit_xor(V::counting_from(index), V::set1(stream0));
  x = V::bit_xor(x, V::template shift_right<16>(x));
  x = V::add(V::mul(x, V::set1(kMix1)), V::set1(stream1));
  x = V::bit_xor(x, V::template shift_right<15>(x));
  x = V::mul(x, V::set1(kMix2));
  return V::bit_xor(x, V::template shift_right<15>(x));
}

template <class V, class Lanes>
inline void publish(const stallfree::Plan& plan, float ahead, int64_t i, typename V::Float x, typename V::Float q, Lanes lanes) {
  // Without look-ahead `out` is the master itself, also where q is infinite (0 * q) or x is -0.
  const typename V::Float value = ahead != 0.0f ? V::fnma(V::set1(ahead), q, x) : x;
  switch (plan.out_dtype) {
    case STALLFREE_F32: V::store(static_cast<float*>(plan.out) + i, value, lanes); break;
    case STALLFREE_BF16: V::store(static_cast<BF16*>(plan.out) + i, value, lanes); break;
    default: V::store(static_cast<F16*>(plan.out) + i, value, lanes); break;
  }
}

template <class V, class Lanes>
inline void store_moments(float* exp_avg, float* exp_avg_sq, typename V::Float m, typename V::Float v, uint32_t, const stallfree::Segment&, Lanes lanes) {
  V::store(exp_avg, m, lanes);
  V::store(exp_avg_sq, v, lanes);
}

template <class V, class Lanes>
inline void store_moments(BF16* exp_avg, BF16* exp_avg_sq, typename V::Float m, typename V::Float v, uint32_t index, const stallfree::Segment& segment, Lanes lanes) {
  const typename V::Int bits = random_bits<V>(index, segment.stream0, segment.stream1);
  V::store_stochastic(exp_avg, m, V::bit_and(bits, V::set1(0xffffu)), lanes);
  V::store_stochastic(exp_avg_sq, v, V::template shift_right<16>(bits), lanes);
}

// U vectors at once, beginning `offset` elements into the segment: enough independent work to hide latencies.
template <class V, class Grad, class Moment, int U, class Lanes>
inline void update(const stallfree::Plan& plan, const stallfree::Segment& segment, int64_t offset, Lanes lanes) {
  using Float = typename V::Float;
  const int64_t state = segment.state + offset, grad = segment.grad + offset;
  float* const master = plan.master + state;
  Moment* const exp_avg = static_cast<Moment*>(plan.exp_avg) + state;
  Moment* const exp_avg_sq = static_cast<Moment*>(plan.exp_avg_sq) + state;

  Float x[U], m[U], v[U], q[U], g[U];
  for (int u = 0; u < U; ++u) {
    x[u] = V::load(master + u * V::width, lanes);
    m[u] = V::load(exp_avg + u * V::width, lanes);
    v[u] = V::load(exp_avg_sq + u * V::width, lanes);
    q[u] = V::zero();
  }
  for (int32_t k = 0; k < segment.step_count; ++k) {
    if (plan.mean) {
      for (int u = 0; u < U; ++u) g[u] = V::zero();
      for (int32_t slot = 0; slot < plan.slots; ++slot) {
        const Grad* from = static_cast<const Grad*>(plan.grads[slot]) + grad;
        for (int u = 0; u < U; ++u) g[u] = V::fma(V::set1(plan.factors[slot]), V::load(from + u * V::width, lanes), g[u]);
      }
    } else {
      const Grad* from = static_cast<const Grad*>(plan.grads[k]) + grad;
      for (int u = 0; u < U; ++u) g[u] = V::load(from + u * V::width, lanes);
    }
    const stallfree::Step& step = segment.steps[k];
    for (int u = 0; u < U; ++u) {
      const Float root = V::mul(V::set1(step.square_scale), g[u]);
      m[u] = V::fma(V::set1(step.beta1), m[u], V::mul(V::set1(step.grad_scale), g[u]));
      v[u] = V::fma(root, root, V::mul(V::set1(step.beta2), v[u]));
      q[u] = V::quotient(m[u], v[u], step.root_scale, step.eps);
      x[u] = V::fnma(V::set1(step.step), q[u], V::mul(V::set1(step.decay), x[u]));
    }
  }
  // `out` comes last: it may share memory with a gradient that was read above.
  for (int u = 0; u < U; ++u) {
    if (plan.commit) {
      V::store(master + u * V::width, x[u], lanes);
      store_moments<V>(exp_avg + u * V::width, exp_avg_sq + u * V::width, m[u], v[u], static_cast<uint32_t>(state + u * V::width), segment, lanes);
    }
    if (plan.out) publish<V>(plan, segment.ahead, grad + u * V::width, x[u], q[u], lanes);
  }
}

template <class V, class Grad, class Moment>
void run_segment(const stallfree::Plan& plan, const stallfree::Segment& segment) {
  constexpr int64_t block = V::unroll * V::width;
  int64_t offset = 0;
  for (; offset + block <= segment.count; offset += block) {
    update<V, Grad, Moment, V::unroll>(plan, segment, offset, V::all_lanes());
  }
  for (; offset + V::width <= segment.count; offset += V::width) {
    update<V, Grad, Moment, 1>(plan, segment, offset, V::all_lanes());
  }
  if (offset < segment.count) update<V, Grad, Moment, 1>(plan, segment, offset, V::first_lanes(static_cast<int>(segment.count - offset)));
}

}  // namespace

#define STALLFREE_TABLE(V) \
  { {run_segment<V, float, float>, run_segment<V, float, BF16>}, \
    {run_segment<V, BF16, float>, run_segment<V, BF16, BF16>}, \
    {run_segment<V, F16, float>, run_segment<V, F16, BF16>} }
