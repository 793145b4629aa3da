#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

namespace stallfree {

namespace {

// About 20 microseconds: bridges the gap between jobs that follow each other, and is soon over when nothing follows.
constexpr int kSpins = 1000;

template <class Done>
void spin_until(Done done) {
  for (int i = 0; i < kSpins && !done(); ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

bool bind(std::thread& thread, const int32_t* cores, size_t count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (size_t i = 0; i < count; ++i) {
    if (cores[i] < 0 || cores[i] >= CPU_SETSIZE) return false;
    CPU_SET(cores[i], &set);
  }
  return pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) == 0;
}

}  // namespace

Pool::Pool(int threads, const std::vector<int32_t>& cores, bool pin) : caller_works_(cores.empty()), owner_(getpid()) {
  const int helpers = caller_works_ ? threads - 1 : threads;
  helpers_.reserve(helpers);
  try {
    for (int i = 0; i < helpers; ++i) {
      helpers_.emplace_back(&Pool::work, this, i);
      if (caller_works_) continue;
      const bool bound = pin ? bind(helpers_.back(), &cores[i], 1) : bind(helpers_.back(), cores.data(), cores.size());
      if (!bound) throw CannotPin();
    }
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

bool Pool::usable() const { return helpers_.empty() || getpid() == owner_; }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    round_.fetch_add(1, std::memory_order_release);
  }
  started_.notify_all();
  for (auto& helper : helpers_) helper.join();
  helpers_.clear();
}

void Pool::run(Task task, void* context, int participants) {
  const int wanted = participants - (caller_works_ ? 1 : 0);
  if (wanted > 0) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      wanted_ = wanted;
      running_.store(wanted, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
    }
    started_.notify_all();
  }
  if (caller_works_) task(context, participants - 1);
  const auto done = [this] { return running_.load(std::memory_order_acquire) == 0; };
  spin_until(done);
  if (!done()) {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, done);
  }
}

void Pool::work(int helper) {
  uint64_t seen = 0;
  for (;;) {
    const auto next = [&] { return round_.load(std::memory_order_acquire) != seen; };
    spin_until(next);
    Task task;
    void* context;
    bool wanted;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      started_.wait(lock, next);
      if (stopping_) return;
      seen = round_.load(std::memory_order_relaxed);
      task = task_;
      context = context_;
      wanted = helper < wanted_;
    }
    if (!wanted) continue;
    task(context, helper);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_.notify_one();
    }
  }
}

}  // namespace stallfree
