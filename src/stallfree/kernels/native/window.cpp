#include "window.h"

#include <time.h>

#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// A gate that is about to open is met spinning; one that is far is polled, so that the core is free for others.
constexpr int kSpins = 2000;
constexpr long kPollNanoseconds = 20000;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

bool is_open(const stallfree_gate& gate) {
  const uint32_t now = __atomic_load_n(gate.flag, __ATOMIC_ACQUIRE);
  return static_cast<int32_t>(now - gate.value) >= 0;
}

bool wait_for(const stallfree_gate& gate, const int32_t* stop) {
  for (int spin = 0; !is_open(gate); ++spin) {
    if (__atomic_load_n(stop, __ATOMIC_RELAXED)) return false;
    if (spin < kSpins) {
      pause_briefly();
    } else {
      const timespec poll{0, kPollNanoseconds};
      nanosleep(&poll, nullptr);
    }
  }
  return true;
}

// The slots that count, with their final factors.
std::vector<stallfree_slot> resolve(const stallfree_job& job, const stallfree_late* late) {
  std::vector<stallfree_slot> slots;
  slots.reserve(job.slot_count);
  for (int32_t i = 0; i < job.slot_count; ++i) {
    stallfree_slot slot = job.slots[i];
    if (late && late[i].record) {
      if (late[i].record[0] != 0.0f) continue;
      slot.factor *= late[i].record[late[i].index];
    }
    slots.push_back(slot);
  }
  return slots;
}

int32_t run_window(stallfree_pool* pool, const stallfree_window& window, const int32_t* stop) {
  for (int32_t i = 0; i < window.gate_count; ++i)
    if (!wait_for(window.gates[i], stop)) return STALLFREE_STOPPED;
  for (int32_t i = 0; i < window.job_count; ++i) {
    stallfree_job job = window.jobs[i];
    const std::vector<stallfree_slot> slots = resolve(job, window.late ? window.late[i] : nullptr);
    job.slots = slots.data();
    job.slot_count = static_cast<int32_t>(slots.size());
    if (const int32_t status = stallfree_replay(pool, &job)) return status;
  }
  if (window.done) __atomic_store_n(window.done, window.done_value, __ATOMIC_RELEASE);
  return STALLFREE_OK;
}

}  // namespace

extern "C" int32_t stallfree_run(stallfree_pool* pool, const stallfree_window* windows, int32_t count, const int32_t* stop,
                                 int32_t* failed) {
  for (int32_t i = 0; i < count; ++i) {
    *failed = i;
    try {
      if (const int32_t status = run_window(pool, windows[i], stop)) return status;
    } catch (const std::bad_alloc&) {
      return STALLFREE_OUT_OF_MEMORY;
    }
  }
  *failed = -1;
  return STALLFREE_OK;
}
