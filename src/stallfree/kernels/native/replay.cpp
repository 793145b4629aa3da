// The driver: checks jobs, turns hyperparameters into fp32 constants, cuts the work and shares it among threads.
#include "replay.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

#include "jobs.h"
#include "plan.h"

struct stallfree_pool {
  stallfree_pool(int32_t threads, const std::vector<int32_t>& cores, bool pin, const stallfree::Table& table)
      : threads(threads, cores, pin), table(table), most(threads) {}

  stallfree::Pool threads;
  const stallfree::Table& table;
  std::atomic<int> most;  // threads that may work
  std::mutex one_task;
  std::atomic<int> owners{1};  // whoever created it, and its queues
};

namespace stallfree {
namespace {

// Below this a thread's share is not worth waking it for (about 10 microseconds of work).
constexpr int64_t kMinChunk = 16 * 1024;
// Above it a chunk only makes the last thread late.
constexpr int64_t kMaxChunk = 256 * 1024;
// Chunks start on a cache line of every array when rows do.
constexpr int64_t kChunkAlign = 64;

// The finalizer of splitmix64.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

Step adamw_step(const stallfree_slot& slot, double factor, int64_t n) {
  const double correction1 = 1.0 - std::pow(slot.beta1, static_cast<double>(n));
  const double correction2 = 1.0 - std::pow(slot.beta2, static_cast<double>(n));
  Step step;
  step.beta1 = static_cast<float>(slot.beta1);
  step.grad_scale = static_cast<float>((1.0 - slot.beta1) * factor);
  step.beta2 = static_cast<float>(slot.beta2);
  step.square_scale = static_cast<float>(std::sqrt(1.0 - slot.beta2) * factor);
  step.root_scale = static_cast<float>(1.0 / std::sqrt(correction2));
  step.eps = static_cast<float>(slot.eps);
  step.decay = static_cast<float>(1.0 - slot.lr * slot.weight_decay);
  step.rate = static_cast<float>(slot.lr / correction1);
  return step;
}

// torch leaves denormals on and rounds to nearest; the calling thread may have set something else (torch.set_flush_denormal).
class DefaultFloatingPoint {
 public:
#if defined(__x86_64__)
  DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

class Window {
 public:
  Window(const stallfree_job& job, RunSegment run_segment, int threads)
      : job_(job),
        run_segment_(run_segment),
        step_count_(job.rule == STALLFREE_MEAN ? std::min(job.slot_count, 1) : job.slot_count) {
    for (int32_t k = 0; k < job.slot_count; ++k) {
      grads_.push_back(job.slots[k].grad);
      factors_.push_back(static_cast<float>(job.slots[k].factor));
    }
    // Threads write into memory that exists already: they cannot fail.
    steps_.resize(static_cast<size_t>(threads) * step_count_);
    plan_.master = job.master;
    plan_.exp_avg = job.exp_avg;
    plan_.exp_avg_sq = job.exp_avg_sq;
    plan_.grads = grads_.data();
    plan_.factors = factors_.data();
    plan_.out = job.out;
    plan_.slots = job.slot_count;
    plan_.out_dtype = job.out_dtype;
    plan_.mean = job.rule == STALLFREE_MEAN;
    plan_.commit = job.commit && job.slot_count > 0;
    const int64_t share = elements() / (8 * threads);
    chunk_ = std::clamp((share + kChunkAlign - 1) / kChunkAlign * kChunkAlign, kMinChunk, kMaxChunk);
  }

  int64_t chunks() const { return (elements() + chunk_ - 1) / chunk_; }

  void work(int worker) {
    const DefaultFloatingPoint scope;
    Step* steps = steps_.data() + static_cast<size_t>(worker) * step_count_;
    for (;;) {
      const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= elements()) return;
      run(begin, std::min(begin + chunk_, elements()), steps);
    }
  }

  // The step counts advance last: threads that share a channel all read the old one.
  void advance_steps() const {
    if (!plan_.commit) return;
    for (int64_t i = 0; i < job_.row_count; ++i) job_.steps[job_.rows[i]] += step_count_;
  }

 private:
  int64_t elements() const { return job_.row_count * job_.length; }

  // Elements [begin, end) of the window's rows, laid end to end.
  void run(int64_t begin, int64_t end, Step* steps) const {
    int64_t known = -1;  // the step count that `steps` and `ahead` were made for
    float ahead = 0.0f;
    for (Segment segment = segment_at(begin, end); segment.count;) {
      const Segment following = segment_at(segment.grad + segment.count, end);
      const int64_t taken = job_.steps[segment.state / job_.length];
      if (taken != known) ahead = set_steps(known = taken, steps);
      segment.next = following.count ? following.state : segment.state + segment.count;
      segment.steps = steps;
      segment.ahead = ahead;
      run_segment_(plan_, segment);
      segment = following;
    }
  }

  // The longest segment from `begin` on, but for the constants of its steps; an empty one at the end.
  Segment segment_at(int64_t begin, int64_t end) const {
    Segment segment = {};
    if (begin >= end) return segment;
    const int64_t first = begin / job_.length;
    const int32_t taken = job_.steps[job_.rows[first]];
    // Neighbouring channels with the same step count are one run of memory.
    int64_t after = first + 1;
    while (after * job_.length < end && job_.rows[after] == job_.rows[after - 1] + 1 &&
           job_.steps[job_.rows[after]] == taken) {
      ++after;
    }
    segment.grad = begin;
    segment.state = job_.rows[first] * job_.length + begin % job_.length;
    segment.count = std::min(end, after * job_.length) - begin;
    // A stream of random bits covers 2^32 elements.
    segment.count = std::min(segment.count, (segment.state | 0xffffffff) + 1 - segment.state);
    segment.step_count = step_count_;
    const uint64_t n = static_cast<uint64_t>(taken) + static_cast<uint64_t>(step_count_);
    const uint64_t stream = mix(mix(job_.key) ^ (n << 32 | static_cast<uint64_t>(segment.state) >> 32));
    segment.stream0 = static_cast<uint32_t>(stream);
    segment.stream1 = static_cast<uint32_t>(stream >> 32);
    return segment;
  }

  // Fills in the constants of a channel that has taken so many steps; returns its look-ahead (Segment::ahead).
  float set_steps(int64_t taken, Step* steps) const {
    if (!step_count_) return 0.0f;
    const stallfree_slot& last = job_.slots[job_.slot_count - 1];
    if (plan_.mean) {
      steps[0] = adamw_step(last, 1.0 / job_.slot_count, taken + 1);
    } else {
      for (int32_t k = 0; k < step_count_; ++k) {
        steps[k] = adamw_step(job_.slots[k], job_.slots[k].factor, taken + k + 1);
      }
    }
    const double correction1 = 1.0 - std::pow(last.beta1, static_cast<double>(taken + step_count_));
    return static_cast<float>(job_.lookahead * last.lr / correction1);
  }

  const stallfree_job& job_;
  const RunSegment run_segment_;
  const int32_t step_count_;
  std::vector<const void*> grads_;
  std::vector<float> factors_;
  std::vector<Step> steps_;  // [threads][step_count_]
  Plan plan_;
  int64_t chunk_;
  std::atomic<int64_t> next_{0};
};

int32_t check(const stallfree_job& job) {
  const int32_t most = INT32_MAX - job.slot_count;
  for (int64_t i = 0; i < job.row_count; ++i) {
    const int64_t row = job.rows[i];
    if (row < 0 || row >= job.channels || (i && row <= job.rows[i - 1])) return STALLFREE_BAD_ROWS;
    if (job.steps[row] < 0 || job.steps[row] > most) return STALLFREE_STEPS_OVERFLOW;
  }
  return STALLFREE_OK;
}

const Table* table_for(int32_t isa) {
#if defined(__x86_64__)
  if (isa == STALLFREE_AVX512) return &avx512_table;
  if (isa == STALLFREE_AVX512_RSQRT) return &avx512_rsqrt_table;
  if (isa == STALLFREE_AVX2) return &avx2_table;
#endif
  return &portable_table;
}

bool supported(int32_t isa) {
  if (isa == STALLFREE_PORTABLE) return true;
#if defined(__x86_64__)
  if (isa == STALLFREE_AVX2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
  if (isa == STALLFREE_AVX512 || isa == STALLFREE_AVX512_RSQRT) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#endif
  return false;
}

// Zen 5 takes 7 cycles for the square root and the division of 16 elements (measured), less than the estimate's additional
// instructions; instruction tables give two to three times that for Zen 4 and Intel's processors.
bool has_fast_divider() {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  const unsigned family = ((eax >> 8) & 15) + ((eax >> 20) & 255);
  return family >= 0x1a;
#else
  return false;
#endif
}

bool has_effect(const stallfree_job& job) {
  return job.row_count > 0 && job.length > 0 && (job.out || (job.commit && job.slot_count > 0));
}

}  // namespace

int32_t replay_all(stallfree_pool* pool, const stallfree_job* jobs, int32_t count) {
  if (!pool->threads.usable()) return STALLFREE_FORKED;
  for (int32_t i = 0; i < count; ++i)
    if (const int32_t status = check(jobs[i])) return status;
  const int threads = pool->threads.threads();
  std::deque<Window> windows;
  int64_t chunks = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (!has_effect(jobs[i])) continue;
    windows.emplace_back(jobs[i], pool->table[jobs[i].grad_dtype][jobs[i].moment_dtype], threads);
    chunks += windows.back().chunks();
  }
  if (windows.empty()) return STALLFREE_OK;
  const auto work = [](void* context, int worker) {
    for (Window& window : *static_cast<std::deque<Window>*>(context)) window.work(worker);
  };
  run_on(pool, work, &windows, chunks);
  for (const Window& window : windows) window.advance_steps();
  return STALLFREE_OK;
}

void run_on(stallfree_pool* pool, Task task, void* context, int64_t participants) {
  const std::lock_guard<std::mutex> lock(pool->one_task);
  const int64_t most = pool->most.load(std::memory_order_relaxed);
  pool->threads.run(task, context, static_cast<int>(std::clamp<int64_t>(participants, 1, most)));
}

void retain(stallfree_pool* pool) { pool->owners.fetch_add(1); }

}  // namespace stallfree

extern "C" {

int32_t stallfree_abi_version(void) { return STALLFREE_ABI_VERSION; }

int32_t stallfree_best_isa(void) {
  if (stallfree::supported(STALLFREE_AVX512)) {
    return stallfree::has_fast_divider() ? STALLFREE_AVX512 : STALLFREE_AVX512_RSQRT;
  }
  return stallfree::supported(STALLFREE_AVX2) ? STALLFREE_AVX2 : STALLFREE_PORTABLE;
}

int32_t stallfree_pool_create(int32_t threads, const int32_t* cores, int32_t core_count, int32_t pin, int32_t isa,
                              stallfree_pool** pool) {
  if (!stallfree::supported(isa)) return STALLFREE_ISA_UNSUPPORTED;
  try {
    const std::vector<int32_t> chosen(cores, cores + (cores ? core_count : 0));
    *pool = new stallfree_pool(threads, chosen, pin != 0, *stallfree::table_for(isa));
  } catch (const stallfree::Pool::CannotPin&) {
    return STALLFREE_CANNOT_PIN;
  } catch (const std::system_error&) {
    return STALLFREE_NO_THREADS;
  } catch (const std::bad_alloc&) {
    return STALLFREE_OUT_OF_MEMORY;
  }
  return STALLFREE_OK;
}

void stallfree_pool_destroy(stallfree_pool* pool) {
  // In a forked child there is no thread to join, and ending the pool without joining ends the process: leave it to the exit.
  if (pool->threads.usable() && pool->owners.fetch_sub(1) == 1) delete pool;
}

void stallfree_pool_limit(stallfree_pool* pool, int32_t threads) {
  pool->most.store(std::clamp(threads, 1, pool->threads.threads()), std::memory_order_relaxed);
}

int32_t stallfree_replay(stallfree_pool* pool, const stallfree_job* job) {
  try {
    return stallfree::replay_all(pool, job, 1);
  } catch (const std::bad_alloc&) {
    return STALLFREE_OUT_OF_MEMORY;
  }
}

const char* stallfree_message(int32_t status) {
  switch (status) {
    case STALLFREE_OK: return "no error";
    case STALLFREE_BAD_ROWS: return "rows must be strictly ascending and lie in [0, channels)";
    case STALLFREE_STEPS_OVERFLOW: return "a channel's step count is negative or would pass 2^31 - 1";
    case STALLFREE_FORKED: return "this kernel was created in another process, before a fork: create one in this process";
    case STALLFREE_ISA_UNSUPPORTED: return "this processor or this build does not have the instruction set asked for";
    case STALLFREE_NO_THREADS: return "the system refused to start a thread";
    case STALLFREE_CANNOT_PIN: return "the system refused to bind a thread to one of the cores asked for";
    case STALLFREE_OUT_OF_MEMORY: return "out of memory";
    case STALLFREE_GIVEN_UP: return "the queue was closed before the gradients had arrived";
    case STALLFREE_BAD_HYPERS: return "betas must be in [0, 1) and eps at least 0";
    default: return "unknown status";
  }
}

}  // extern "C"
