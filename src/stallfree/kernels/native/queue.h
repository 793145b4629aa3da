// A thread that runs the host's windows in order: each begins when its gates are open and tells the word `done` its ticket.
//
// The device and the launching thread speak to it through 32-bit words in memory that all reach. All comparisons of words and
// tickets count modulo 2^32. What a window is, is documented in windows.py (WindowWork).
#ifndef STALLFREE_QUEUE_H
#define STALLFREE_QUEUE_H

#include "replay.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct stallfree_weight {
  float* master;
  void *exp_avg, *exp_avg_sq;
  int32_t* steps;
  int64_t* deferred;     // [channels - selected]; a merge overwrites it
  const int64_t* every;  // [channels]
  int64_t channels, length, selected;
  uint64_t key;
} stallfree_weight;

typedef struct stallfree_block {
  const stallfree_weight* weights;  // [weight_count]
  int32_t weight_count, record_start, rule, slot_dtype, moment_dtype, unused;
} stallfree_block;

// Channels that change hands. The selected rows of the weights lie one after the other.
typedef struct stallfree_exchange {
  float* state[3];         // master, exp_avg, exp_avg_sq: [sum of selected * length]
  int32_t* state_steps;    // [places]
  const int32_t* numbers;  // [places] selected, [sum of channels - selected] deferred, [places] moved
  int32_t* selected;       // [places] the channel that each place holds, or -1
} stallfree_exchange;

typedef struct stallfree_hyper {
  int64_t present;  // 0: the weight had no gradient in the call
  double lr, beta1, beta2, eps, weight_decay;
} stallfree_hyper;

typedef struct stallfree_call {
  char* memory;
  const float* record;  // or null
} stallfree_call;       // followed by stallfree_hyper[weight_count]

typedef struct stallfree_gate {
  const uint32_t* word;
  uint64_t value;
} stallfree_gate;

enum stallfree_window_flags { STALLFREE_DIVIDED = 1, STALLFREE_PUBLISH = 2, STALLFREE_MERGE = 4 };

typedef struct stallfree_window {
  uint64_t bytes;  // with all that follows it: int64_t places[place_count], stallfree_gate[gate_count], calls, and
                   // with STALLFREE_MERGE a stallfree_exchange
  const stallfree_block* block;
  double lookahead, pause_seconds;
  int32_t call_count, gate_count, place_count, flags;  // place_count -1: all weights
  int64_t begin, end;                                  // of a call's elements: the rows that begin there are worked on
} stallfree_window;

typedef struct stallfree_queue_stats {
  int64_t windows, elements, busy_ns;  // of windows that are done
  int64_t running_ns;                  // for which the next one has been worked on
} stallfree_queue_stats;

typedef struct stallfree_queue_entry {
  int64_t ticket, gates_open_ns, begin_ns, end_ns;  // CLOCK_MONOTONIC
} stallfree_queue_entry;

typedef struct stallfree_queue stallfree_queue;

// Tickets count on from the word's value. The queue shares the pool until it is stopped.
STALLFREE_EXPORT int32_t stallfree_queue_create(stallfree_pool* pool, uint32_t* done, stallfree_queue** queue);

// Takes `count` windows that follow each other in memory, which is copied; blocks and arrays must live until they are done.
// After a failure or a stop, their tickets are counted and that is all.
STALLFREE_EXPORT int32_t stallfree_queue_submit(stallfree_queue* queue, const void* windows, int32_t count);

// The last ticket that ended well.
STALLFREE_EXPORT uint32_t stallfree_queue_completed(stallfree_queue* queue);

// STALLFREE_OK, or the status of the window that failed. No later one is begun; `done` is 2^30 ahead of the last ticket.
STALLFREE_EXPORT int32_t stallfree_queue_failure(stallfree_queue* queue, uint32_t* ticket);

// Whether the ticket ended well, or any failed, within this time.
STALLFREE_EXPORT int32_t stallfree_queue_wait(stallfree_queue* queue, uint32_t ticket, int32_t milliseconds);

STALLFREE_EXPORT void stallfree_queue_read_stats(stallfree_queue* queue, stallfree_queue_stats* stats);

// The last windows, oldest first; returns how many.
STALLFREE_EXPORT int32_t stallfree_queue_history(stallfree_queue* queue, stallfree_queue_entry* entries, int32_t most);

// Runs the windows whose gates are open, gives up the first whose gates are not, and joins the thread. Idempotent.
STALLFREE_EXPORT void stallfree_queue_stop(stallfree_queue* queue);

// Does nothing in a forked child, where there is no thread.
STALLFREE_EXPORT void stallfree_queue_destroy(stallfree_queue* queue);

#ifdef __cplusplus
}
#endif
#endif
