#include "queue.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "jobs.h"
#include "merge.h"

namespace stallfree {
namespace {

// A gate that is about to open is met spinning; one that is far is polled, so that the core is free for others: after a
// 64th of the time waited so far, within these bounds.
constexpr int kSpins = 2000;
constexpr int64_t kPollNanoseconds = 20000, kLongPollNanoseconds = 100000;
constexpr uint32_t kFarAhead = 1u << 30;
constexpr size_t kHistory = 4096;

using Message = std::vector<uint64_t>;  // a stallfree_window and what follows it

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

bool reached(uint32_t now, uint32_t value) { return static_cast<int32_t>(now - value) >= 0; }

bool wait_for(const stallfree_gate& gate, const std::atomic<bool>& stopping) {
  int64_t begin = 0;
  for (int64_t spin = 0;; ++spin) {
    if (reached(__atomic_load_n(gate.word, __ATOMIC_ACQUIRE), static_cast<uint32_t>(gate.value))) return true;
    if (stopping.load(std::memory_order_relaxed)) return false;
    if (spin < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      if (spin == kSpins) begin = now_ns();
      const timespec poll{0, std::clamp((now_ns() - begin) / 64, kPollNanoseconds, kLongPollNanoseconds)};
      nanosleep(&poll, nullptr);
    }
  }
}

// A window in the form in which it was submitted.
class Work {
 public:
  explicit Work(const Message& message)
      : window(*reinterpret_cast<const stallfree_window*>(message.data())),
        block(*window.block),
        places(reinterpret_cast<const int64_t*>(&window + 1)),
        gates(reinterpret_cast<const stallfree_gate*>(places + std::max(window.place_count, 0))) {}

  const stallfree_call& call(int32_t i) const { return *reinterpret_cast<const stallfree_call*>(after_calls(i)); }

  const stallfree_exchange& exchange() const {
    return *reinterpret_cast<const stallfree_exchange*>(after_calls(window.call_count));
  }

  const stallfree_hyper& hyper(int32_t i, int32_t weight) const {
    return reinterpret_cast<const stallfree_hyper*>(&call(i) + 1)[weight];
  }

  bool updates(int32_t weight) const {
    return window.place_count < 0 || std::count(places, places + window.place_count, weight);
  }

  bool is(stallfree_window_flags flag) const { return window.flags & flag; }

  const stallfree_window& window;
  const stallfree_block& block;
  const int64_t* const places;
  const stallfree_gate* const gates;

 private:
  const char* after_calls(int32_t count) const {
    const size_t bytes = sizeof(stallfree_call) + block.weight_count * sizeof(stallfree_hyper);
    return reinterpret_cast<const char*>(gates + window.gate_count) + count * bytes;
  }
};

// How many of a weight's rows begin before an element.
int64_t rows_before(int64_t element, int64_t length, int64_t rows) {
  return element <= 0 ? 0 : std::min(rows, (element - 1) / length + 1);
}

// One job for each weight of a window. A weight that no call has a gradient for publishes its masters.
int32_t replay(stallfree_pool* pool, const Work& work, int64_t* elements) {
  const stallfree_block& block = work.block;
  const int64_t slot_bytes = block.slot_dtype == STALLFREE_F32 ? 4 : 2;
  std::vector<stallfree_slot> slots;
  std::vector<stallfree_job> jobs;
  slots.reserve(static_cast<size_t>(block.weight_count) * work.window.call_count);  // jobs point into it
  jobs.reserve(block.weight_count);
  int64_t offset = 0;
  for (int32_t w = 0; w < block.weight_count; ++w) {
    const stallfree_weight& weight = block.weights[w];
    const bool divided = work.is(STALLFREE_DIVIDED);
    const int64_t all = weight.channels - (divided ? weight.selected : 0);
    const int64_t first = rows_before(work.window.begin - offset, weight.length, all);
    const int64_t rows = rows_before(work.window.end - offset, weight.length, all) - first;
    const int64_t begin = (offset + first * weight.length) * slot_bytes;
    offset += all * weight.length;
    if (rows <= 0 || !work.updates(w)) continue;
    stallfree_job job = {};
    job.master = weight.master;
    job.exp_avg = weight.exp_avg;
    job.exp_avg_sq = weight.exp_avg_sq;
    job.steps = weight.steps;
    job.rows = (divided ? weight.deferred : weight.every) + first;
    job.slots = slots.data() + slots.size();
    job.out = work.is(STALLFREE_PUBLISH) ? work.call(0).memory + begin : nullptr;
    job.channels = weight.channels;
    job.length = weight.length;
    job.row_count = rows;
    job.grad_dtype = job.out_dtype = block.slot_dtype;
    job.moment_dtype = block.moment_dtype;
    job.rule = block.rule;
    job.commit = 1;
    job.lookahead = work.window.lookahead;
    job.key = weight.key;
    for (int32_t i = 0; i < work.window.call_count; ++i) {
      const stallfree_call& call = work.call(i);
      const stallfree_hyper& hyper = work.hyper(i, w);
      if (!hyper.present || (call.record && call.record[0] != 0.0f)) continue;
      const bool sound = 0 <= hyper.beta1 && hyper.beta1 < 1 && 0 <= hyper.beta2 && hyper.beta2 < 1 && hyper.eps >= 0;
      if (!sound) return STALLFREE_BAD_HYPERS;
      const double factor = call.record ? call.record[block.record_start + w] : 1.0;
      slots.push_back({call.memory + begin, hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, factor});
      ++job.slot_count;
    }
    *elements += job.slot_count * rows * weight.length;
    jobs.push_back(job);
  }
  return replay_all(pool, jobs.data(), static_cast<int32_t>(jobs.size()));
}

}  // namespace
}  // namespace stallfree

using stallfree::Message;

struct stallfree_queue {
  stallfree_queue(stallfree_pool* pool, uint32_t* done)
      : pool(pool), done(done), submitted(*done), completed(*done), history(stallfree::kHistory) {
    thread = std::thread(&stallfree_queue::work, this);
    stallfree::retain(pool);
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (uint32_t ticket = completed + 1;; ++ticket) {
      arrived.wait(lock, [this] { return stopping || !pending.empty(); });
      if (pending.empty()) return;
      const Message message = std::move(pending.front());
      pending.pop_front();
      lock.unlock();
      stallfree_queue_entry times = {ticket, 0, 0, 0};
      int64_t elements = 0;
      const int32_t status = run(stallfree::Work(message), &times, &elements);
      lock.lock();
      times.end_ns = stallfree::now_ns();
      working_since = 0;
      if (status) {
        failure = status;
        failed = ticket;
        pending.clear();
        tell(submitted + stallfree::kFarAhead);
        return;
      }
      history[stats.windows++ % history.size()] = times;
      stats.elements += elements;
      stats.busy_ns += times.end_ns - times.begin_ns;
      completed = ticket;
      tell(ticket);
    }
  }

  int32_t run(const stallfree::Work& work, stallfree_queue_entry* times, int64_t* elements) {
    for (int32_t i = 0; i < work.window.gate_count; ++i)
      if (!stallfree::wait_for(work.gates[i], stopping)) return STALLFREE_GIVEN_UP;
    times->gates_open_ns = stallfree::now_ns();
    if (work.window.pause_seconds > 0) {
      std::this_thread::sleep_for(std::chrono::duration<double>(work.window.pause_seconds));
    }
    working_since = times->begin_ns = stallfree::now_ns();
    int32_t status;
    try {
      status = stallfree::replay(pool, work, elements);
      if (!status && work.is(STALLFREE_MERGE)) status = stallfree::Merge(work.block, work.exchange()).run(pool);
    } catch (const std::bad_alloc&) {
      status = STALLFREE_OUT_OF_MEMORY;
    }
    return status;
  }

  // With the mutex, so that whoever has seen the word finds the queue's state up to date.
  void tell(uint32_t value) {
    __atomic_store_n(done, value, __ATOMIC_RELEASE);
    finished.notify_all();
  }

  stallfree_pool* const pool;
  uint32_t* const done;
  const pid_t owner = getpid();
  std::thread thread;
  std::mutex mutex;
  std::condition_variable arrived, finished;
  std::atomic<bool> stopping{false};
  std::atomic<int64_t> working_since{0};  // 0: no window is worked on
  // Under the mutex
  std::list<Message> pending;
  uint32_t submitted, completed, failed = 0;
  int32_t failure = STALLFREE_OK;
  stallfree_queue_stats stats = {};
  std::vector<stallfree_queue_entry> history;  // a ring; window number n, from 0, is at n % kHistory
};

extern "C" {

int32_t stallfree_queue_create(stallfree_pool* pool, uint32_t* done, stallfree_queue** queue) {
  try {
    *queue = new stallfree_queue(pool, done);
  } catch (const std::system_error&) {
    return STALLFREE_NO_THREADS;
  } catch (const std::bad_alloc&) {
    return STALLFREE_OUT_OF_MEMORY;
  }
  return STALLFREE_OK;
}

int32_t stallfree_queue_submit(stallfree_queue* queue, const void* windows, int32_t count) {
  std::list<Message> messages;
  try {
    const char* next = static_cast<const char*>(windows);
    for (int32_t i = 0; i < count; ++i) {
      uint64_t bytes;
      std::memcpy(&bytes, next, sizeof bytes);
      messages.emplace_back(bytes / sizeof(uint64_t));
      std::memcpy(messages.back().data(), next, bytes);
      next += bytes;
    }
  } catch (const std::bad_alloc&) {
    return STALLFREE_OUT_OF_MEMORY;
  }
  const std::lock_guard<std::mutex> lock(queue->mutex);
  queue->submitted += static_cast<uint32_t>(count);
  if (!queue->failure && !queue->stopping) queue->pending.splice(queue->pending.end(), messages);
  queue->arrived.notify_one();
  return STALLFREE_OK;
}

uint32_t stallfree_queue_completed(stallfree_queue* queue) {
  const std::lock_guard<std::mutex> lock(queue->mutex);
  return queue->completed;
}

int32_t stallfree_queue_failure(stallfree_queue* queue, uint32_t* ticket) {
  const std::lock_guard<std::mutex> lock(queue->mutex);
  *ticket = queue->failed;
  return queue->failure;
}

int32_t stallfree_queue_wait(stallfree_queue* queue, uint32_t ticket, int32_t milliseconds) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  return queue->finished.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] {
    return queue->failure || stallfree::reached(queue->completed, ticket);
  });
}

void stallfree_queue_read_stats(stallfree_queue* queue, stallfree_queue_stats* stats) {
  const std::lock_guard<std::mutex> lock(queue->mutex);
  *stats = queue->stats;
  const int64_t since = queue->working_since;
  stats->running_ns = since ? stallfree::now_ns() - since : 0;
}

int32_t stallfree_queue_history(stallfree_queue* queue, stallfree_queue_entry* entries, int32_t most) {
  const std::lock_guard<std::mutex> lock(queue->mutex);
  const int64_t kept = std::min<int64_t>({queue->stats.windows, most, stallfree::kHistory});
  for (int64_t i = 0; i < kept; ++i) {
    entries[i] = queue->history[(queue->stats.windows - kept + i) % queue->history.size()];
  }
  return static_cast<int32_t>(kept);
}

void stallfree_queue_stop(stallfree_queue* queue) {
  if (getpid() != queue->owner || !queue->thread.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(queue->mutex);
    queue->stopping = true;
  }
  queue->arrived.notify_one();
  queue->thread.join();
  stallfree_pool_destroy(queue->pool);
}

void stallfree_queue_destroy(stallfree_queue* queue) {
  if (getpid() != queue->owner) return;
  stallfree_queue_stop(queue);
  delete queue;
}

}  // extern "C"
