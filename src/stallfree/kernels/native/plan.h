// What the driver (replay.cpp) hands to an instruction path: a job reduced to pointers, fp32 coefficients and flat ranges.
#pragma once

#include <cstdint>

namespace stallfree {

// One AdamW step's constants, computed in double and rounded once. With them a step is
//   m = beta1 m + grad_scale G      v = beta2 v + (square_scale G)^2      q = m / (sqrt(v) root_scale + eps)
//   x = x decay - rate q
// where G is the gradient as stored (in rule "mean": the sum of factor * gradient over the slots).
struct Step {
  float beta1, grad_scale;    // grad_scale = factor (1 - beta1)
  float beta2, square_scale;  // square_scale = factor sqrt(1 - beta2): one multiplication less than factor * G first
  float root_scale, eps;      // root_scale = 1 / sqrt(1 - beta2^n)
  float decay, rate;          // decay = 1 - lr weight_decay, rate = lr / (1 - beta1^n)
};

struct Plan {
  float* master;
  void *exp_avg, *exp_avg_sq;
  const void* const* grads;  // [slots]
  const float* factors;      // [slots]; read by rule "mean" only
  void* out;
  int32_t slots, out_dtype;
  bool mean, commit;
};

// Elements [state, state + count) of the state arrays and [grad, grad + count) of the gradients and `out`: whole or part
// of rows that follow each other in both and have the same step count.
struct Segment {
  int64_t state, grad, count;
  int64_t next;               // where the state of the element after the segment's last is; for prefetching
  const Step* steps;          // one per AdamW step
  int32_t step_count;         // the number of slots, or 1 under rule "mean", or 0 without slots
  float ahead;                // lookahead * lr / (1 - beta1^n) of the last step: out = x - ahead q
  uint32_t stream0, stream1;  // stochastic rounding's stream for (key, n, state >> 32); see random_bits in update.h
};

using RunSegment = void (*)(const Plan&, const Segment&);

// [grad dtype][moment dtype]
using Table = RunSegment[3][2];

extern const Table portable_table;
#if defined(__x86_64__)
extern const Table avx2_table;
extern const Table avx512_table;
extern const Table avx512_rsqrt_table;
#endif

}  // namespace stallfree
