// The C interface of the host replay kernel. native.py binds it through ctypes; nothing here knows Python or torch.
//
// A job replays one parameter's window: for every contributing slot in order, one AdamW step of every deferred channel
//
//   g        = factor * grad
//   exp_avg    = beta1 * exp_avg    + (1 - beta1) * g
//   exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
//   direction  = (exp_avg / (1 - beta1^n)) / (sqrt(exp_avg_sq / (1 - beta2^n)) + eps)
//   master     = master * (1 - lr * weight_decay) - lr * direction
//
// in fp32, with n the channel's own step count, and finally publishes out = master - lr * lookahead * direction.
// All arrays are in host memory. Tensor shapes and what may alias what are documented in replay.py (ReplayJob).
#ifndef STALLFREE_REPLAY_H
#define STALLFREE_REPLAY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Changes whenever a struct or a function below does; native.py refuses a library with another number.
#define STALLFREE_ABI_VERSION 9

#define STALLFREE_EXPORT __attribute__((visibility("default")))

enum stallfree_dtype { STALLFREE_F32 = 0, STALLFREE_BF16 = 1, STALLFREE_F16 = 2 };

enum stallfree_rule { STALLFREE_REPLAY = 0, STALLFREE_MEAN = 1 };

// AVX2 and AVX512 give the same bits. AVX512_RSQRT estimates the square root: fewer cycles where the divider is slow.
enum stallfree_isa { STALLFREE_PORTABLE = 0, STALLFREE_AVX2 = 1, STALLFREE_AVX512 = 2, STALLFREE_AVX512_RSQRT = 3 };

enum stallfree_status {
  STALLFREE_OK = 0,
  STALLFREE_BAD_ROWS = 1,         // rows are not strictly ascending, or not all in [0, channels)
  STALLFREE_STEPS_OVERFLOW = 2,   // a channel's step count would leave [0, 2^31)
  STALLFREE_FORKED = 3,           // the pool's threads do not exist in this process
  STALLFREE_ISA_UNSUPPORTED = 4,  // the processor, or this build, lacks the instruction set asked for
  STALLFREE_NO_THREADS = 5,       // the system refused to start a thread
  STALLFREE_CANNOT_PIN = 6,       // the system refused to bind a thread to its core
  STALLFREE_OUT_OF_MEMORY = 7,
  STALLFREE_GIVEN_UP = 8,         // a queue was stopped before a gate opened (queue.h)
  STALLFREE_BAD_HYPERS = 9,       // queue.h; replay.py checks them for a job
};

typedef struct stallfree_slot {
  const void* grad;  // [row_count, length] of the job's grad_dtype
  double lr, beta1, beta2, eps, weight_decay, factor;
} stallfree_slot;

typedef struct stallfree_job {
  float* master;      // [channels, length]
  void* exp_avg;      // [channels, length] of moment_dtype (F32 or BF16)
  void* exp_avg_sq;   // [channels, length] of moment_dtype
  int32_t* steps;     // [channels]
  const int64_t* rows;  // [row_count]
  const stallfree_slot* slots;  // [slot_count]
  void* out;          // [row_count, length] of out_dtype, or null
  int64_t channels, length, row_count;
  int32_t slot_count, grad_dtype, moment_dtype, out_dtype;
  int32_t rule, commit;
  double lookahead;
  uint64_t key;
} stallfree_job;

typedef struct stallfree_pool stallfree_pool;

STALLFREE_EXPORT int32_t stallfree_abi_version(void);

// The fastest path on this processor. A function of its model only: results must not depend on timing.
STALLFREE_EXPORT int32_t stallfree_best_isa(void);

// `threads` run each job. With `cores` null the calling thread is one of them. Otherwise all of them are the pool's own, and the
// caller sleeps: each is bound to one of the cores, of which there are as many, or (pin 0) to all of them.
STALLFREE_EXPORT int32_t stallfree_pool_create(int32_t threads, const int32_t* cores, int32_t core_count, int32_t pin,
                                               int32_t isa, stallfree_pool** pool);

// From the next job on, at most so many of the pool's threads work; at least one does.
STALLFREE_EXPORT void stallfree_pool_limit(stallfree_pool* pool, int32_t threads);

// Gives the pool up; without a queue on it, joins its threads. No job of the caller may be running.
STALLFREE_EXPORT void stallfree_pool_destroy(stallfree_pool* pool);

// Runs a job to its end. On an error nothing has been changed. Callers on several threads take turns.
STALLFREE_EXPORT int32_t stallfree_replay(stallfree_pool* pool, const stallfree_job* job);

// One sentence for a status.
STALLFREE_EXPORT const char* stallfree_message(int32_t status);

#ifdef __cplusplus
}
#endif
#endif
