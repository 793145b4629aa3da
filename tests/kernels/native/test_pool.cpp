// The host kernel without Python: pools driven from several threads at once must give what one thread gives, bit for bit.
// `make sanitize` runs it plain and under ThreadSanitizer, which an interpreter that is not instrumented drowns in noise.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "replay.h"

namespace {

std::atomic<int> failures{0};

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

// A job on memory of its own; the same seed gives the same contents.
class Job {
 public:
  Job(uint32_t seed, int64_t channels, int64_t length, int slots)
      : master_(channels * length), exp_avg_(master_.size()), exp_avg_sq_(master_.size()), steps_(channels), out_(master_.size()) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values) {
      for (float& value : values) value = normal(random);
    };
    fill(master_);
    fill(exp_avg_);
    fill(exp_avg_sq_);
    for (float& value : exp_avg_sq_) value *= value;
    for (int64_t row = 0; row < channels; ++row) {
      steps_[row] = static_cast<int32_t>(row % 5);
      if (row % 4) rows_.push_back(row);
    }
    for (int slot = 0; slot < slots; ++slot) {
      grads_.emplace_back(rows_.size() * length);
      fill(grads_.back());
    }
    for (const auto& grad : grads_) slots_.push_back({grad.data(), 1e-3, 0.9, 0.99, 1e-8, 0.1, 0.5});
    length_ = length;
  }

  stallfree_job view() {
    stallfree_job job{};
    job.master = master_.data();
    job.exp_avg = exp_avg_.data();
    job.exp_avg_sq = exp_avg_sq_.data();
    job.steps = steps_.data();
    job.rows = rows_.data();
    job.slots = slots_.data();
    job.out = out_.data();
    job.channels = static_cast<int64_t>(steps_.size());
    job.length = length_;
    job.row_count = static_cast<int64_t>(rows_.size());
    job.slot_count = static_cast<int32_t>(slots_.size());
    job.commit = 1;
    job.lookahead = 1.5;
    job.key = 7;
    return job;
  }

  bool operator==(const Job& other) const {
    return master_ == other.master_ && exp_avg_ == other.exp_avg_ && exp_avg_sq_ == other.exp_avg_sq_ &&
           steps_ == other.steps_ && out_ == other.out_;
  }

 private:
  std::vector<float> master_, exp_avg_, exp_avg_sq_;
  std::vector<int32_t> steps_;
  std::vector<float> out_;
  std::vector<int64_t> rows_;
  std::vector<std::vector<float>> grads_;
  std::vector<stallfree_slot> slots_;
  int64_t length_;
};

class Pool {
 public:
  explicit Pool(int threads) {
    expect(stallfree_pool_create(threads, nullptr, 0, 0, stallfree_best_isa(), &pool_) == STALLFREE_OK, "a pool is created");
  }
  ~Pool() { stallfree_pool_destroy(pool_); }

  void replay(Job& job) {
    const stallfree_job view = job.view();
    expect(stallfree_replay(pool_, &view) == STALLFREE_OK, "a job is replayed");
  }

 private:
  stallfree_pool* pool_ = nullptr;
};

constexpr int kRounds = 20, kCallers = 4;

// What kRounds replays on one thread make of a job.
Job expected(uint32_t seed) {
  Job job(seed, 100, 1500 + seed, 3);
  Pool one(1);
  for (int round = 0; round < kRounds; ++round) one.replay(job);
  return job;
}

// Callers on threads of their own, each with its own job, large enough for all threads of the one pool.
void callers_of_one_pool(int threads) {
  Pool pool(threads);
  std::vector<Job> jobs;
  std::vector<std::thread> callers;
  for (uint32_t seed = 0; seed < kCallers; ++seed) jobs.emplace_back(seed, 100, 1500 + seed, 3);
  for (Job& job : jobs) {
    callers.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) pool.replay(job);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (uint32_t seed = 0; seed < kCallers; ++seed) expect(jobs[seed] == expected(seed), "callers of one pool disturb nobody");
}

// Pools that begin and end beside each other, with jobs from one element to more than all threads can share.
void pools_come_and_go() {
  std::vector<std::thread> owners;
  for (uint32_t owner = 0; owner < kCallers; ++owner) {
    owners.emplace_back([owner] {
      for (int round = 0; round < kRounds; ++round) {
        const int64_t length = round % 3 == 0 ? 1 : 20000 * (round % 3);
        Job job(owner, 5, length, round % 4), same(owner, 5, length, round % 4);
        {
          Pool pool(1 + round % 4);
          pool.replay(job);
        }
        Pool(1).replay(same);
        expect(job == same, "a short-lived pool gives the same");
      }
    });
  }
  for (std::thread& owner : owners) owner.join();
}

// A refused job reports, changes nothing, and leaves the pool usable.
void refusals() {
  Job job(1, 8, 16, 2), untouched(1, 8, 16, 2);
  stallfree_pool* pool = nullptr;
  expect(stallfree_pool_create(3, nullptr, 0, 0, stallfree_best_isa(), &pool) == STALLFREE_OK, "a pool is created");
  stallfree_job view = job.view();
  const int64_t rows[] = {2, 1};
  view.rows = rows;
  view.row_count = 2;
  expect(stallfree_replay(pool, &view) == STALLFREE_BAD_ROWS, "rows out of order are refused");
  expect(job == untouched, "a refused job changes nothing");
  view = job.view();
  expect(stallfree_replay(pool, &view) == STALLFREE_OK, "the pool works on");
  stallfree_pool_destroy(pool);
  const int32_t cores[] = {1 << 20};
  expect(stallfree_pool_create(1, cores, 1, 1, stallfree_best_isa(), &pool) == STALLFREE_CANNOT_PIN, "no such core");
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 3, 5}) callers_of_one_pool(threads);
  pools_come_and_go();
  refusals();
  if (failures == 0) std::puts("all right");
  return failures != 0;
}
