// A fixed set of threads that run one task at a time, all of them together.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace stallfree {

// Called once on every participating thread, with its number in [0, participants).
using Task = void (*)(void* context, int worker);

class Pool {
 public:
  // No cores: threads - 1 helpers, and the caller of run() takes part. Otherwise `threads` helpers, each bound to one core (pin),
  // of which there are as many, or to all of them.
  // Throws std::system_error when a thread cannot be started, CannotPin when it cannot be bound.
  Pool(int threads, const std::vector<int32_t>& cores, bool pin);
  // Joins the helpers: only in the process that made them (usable()).
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  struct CannotPin {};

  // The largest number of participants.
  int threads() const { return static_cast<int>(helpers_.size()) + (caller_works_ ? 1 : 0); }

  // After a fork, the helpers exist only in the parent: run() would wait for ever.
  bool usable() const;

  // Runs the task on `participants` threads (1 to threads()) and returns when all are done. Not reentrant.
  void run(Task task, void* context, int participants);

 private:
  void work(int helper);
  void stop();

  const bool caller_works_;
  const pid_t owner_;
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable started_, finished_;
  // Written under mutex_ before round_ advances; round_ and running_ are atomic so that a wait may begin with a short spin.
  Task task_ = nullptr;
  void* context_ = nullptr;
  int wanted_ = 0;
  bool stopping_ = false;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> running_{0};
};

}  // namespace stallfree
