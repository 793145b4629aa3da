// Many jobs in one call: the windows of a step, each begun when its gradients have arrived and announced when it is done.
//
// The device and the launching thread speak to the host through 32-bit flags in memory that both reach. A copy that arrives
// sets a flag (cuStreamWriteValue32); stallfree_run waits for it, works, and sets another, which a stream waits for
// (cuStreamWaitValue32). No thread of the caller has to run in between.
#ifndef STALLFREE_WINDOW_H
#define STALLFREE_WINDOW_H

#include "replay.h"

#ifdef __cplusplus
extern "C" {
#endif

// Open once *flag has reached `value`, counting modulo 2^32.
typedef struct stallfree_gate {
  const uint32_t* flag;
  uint32_t value;
} stallfree_gate;

// What is known of a slot only when its gates are open: record[0] != 0 leaves the slot out (the device skipped the call),
// record[index] multiplies its factor. A null record: nothing.
typedef struct stallfree_late {
  const float* record;
  int32_t index;
} stallfree_late;

typedef struct stallfree_window {
  const stallfree_job* jobs;          // [job_count]
  const stallfree_late* const* late;  // [job_count], each [slot_count] of its job
  const stallfree_gate* gates;        // [gate_count]
  uint32_t* done;                     // set to done_value when all jobs have ended well; null: nobody is told
  int32_t job_count, gate_count;
  uint32_t done_value;
} stallfree_window;

// Runs windows in order and stops at the first that fails, whose number goes to *failed. `stop` becomes nonzero when nobody
// needs the rest any more: a wait for a gate then ends with STALLFREE_STOPPED.
STALLFREE_EXPORT int32_t stallfree_run(stallfree_pool* pool, const stallfree_window* windows, int32_t count,
                                       const int32_t* stop, int32_t* failed);

#ifdef __cplusplus
}
#endif
#endif
