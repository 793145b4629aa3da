// The queue without Python: windows that one thread submits, whose gates another opens, give what the same jobs give in turn.
// `make sanitize` runs it plain and under ThreadSanitizer.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "queue.h"

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

constexpr int64_t kChannels = 24, kLength = 200, kSelected = 4;
constexpr int kWindows = 40, kCalls = 3;

// One weight's state, a gradient for each call of each window, and room for channels that change hands.
struct State {
  State() : master(kChannels * kLength), exp_avg(master.size()), exp_avg_sq(master.size()), steps(kChannels) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& value : master) value = normal(random);
    for (int64_t row = 0; row < kChannels; ++row) every.push_back(row);
    deferred.assign(every.begin() + kSelected, every.end());
    for (int i = 0; i < kWindows * kCalls; ++i) {
      slots.emplace_back((kChannels - kSelected) * kLength);
      for (float& value : slots.back()) value = normal(random);
    }
    for (auto& flat : held) flat.resize(kSelected * kLength);
    for (int32_t place = 0; place < kSelected; ++place) numbers.push_back(place), selected.push_back(-1);
    for (int64_t row = kSelected; row < kChannels; ++row) numbers.push_back(static_cast<int32_t>(row));
    numbers.resize(numbers.size() + kSelected, 1);
    held_steps.resize(kSelected);
  }

  std::vector<float> master, exp_avg, exp_avg_sq;
  std::vector<int32_t> steps;
  std::vector<int64_t> every, deferred;
  std::vector<std::vector<float>> slots;
  std::vector<float> held[3];
  std::vector<int32_t> held_steps, numbers, selected;
};

template <class T>
void append(std::vector<char>& bytes, const T& value) {
  const char* begin = reinterpret_cast<const char*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof value);
}

// The last window also lets channels arrive on the device.
std::vector<char> message(const stallfree_block& block, State& state, int window, const uint32_t* gate) {
  const bool merges = window == kWindows - 1;
  std::vector<char> bytes;
  stallfree_window head = {};
  head.block = &block;
  head.lookahead = 0.5;
  head.call_count = kCalls;
  head.gate_count = 1;
  head.place_count = -1;
  head.end = INT64_MAX;
  head.flags = STALLFREE_DIVIDED | STALLFREE_PUBLISH | (merges ? STALLFREE_MERGE : 0);
  append(bytes, head);
  append(bytes, stallfree_gate{gate, static_cast<uint64_t>(window + 1)});
  for (int call = 0; call < kCalls; ++call) {
    append(bytes, stallfree_call{reinterpret_cast<char*>(state.slots[window * kCalls + call].data()), nullptr});
    append(bytes, stallfree_hyper{1, 1e-3, 0.9, 0.99, 1e-8, 0.1});
  }
  if (merges) {
    stallfree_exchange exchange = {};
    for (int i = 0; i < 3; ++i) exchange.state[i] = state.held[i].data();
    exchange.state_steps = state.held_steps.data();
    exchange.numbers = state.numbers.data();
    exchange.selected = state.selected.data();
    append(bytes, exchange);
  }
  const uint64_t size = bytes.size();
  std::memcpy(bytes.data(), &size, sizeof size);
  return bytes;
}

void replay_in_turn(State& state) {
  stallfree_pool* pool;
  expect(stallfree_pool_create(1, nullptr, 0, 0, stallfree_best_isa(), &pool) == STALLFREE_OK, "a pool is created");
  for (int window = 0; window < kWindows; ++window) {
    std::vector<stallfree_slot> slots;
    for (int call = 0; call < kCalls; ++call) {
      slots.push_back({state.slots[window * kCalls + call].data(), 1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0});
    }
    stallfree_job job = {};
    job.master = state.master.data();
    job.exp_avg = state.exp_avg.data();
    job.exp_avg_sq = state.exp_avg_sq.data();
    job.steps = state.steps.data();
    job.rows = state.deferred.data();
    job.slots = slots.data();
    job.out = state.slots[window * kCalls].data();
    job.channels = kChannels;
    job.length = kLength;
    job.row_count = kChannels - kSelected;
    job.slot_count = kCalls;
    job.commit = 1;
    job.lookahead = 0.5;
    expect(stallfree_replay(pool, &job) == STALLFREE_OK, "a job is done");
  }
  stallfree_pool_destroy(pool);
}

void run_in_queue(State& state) {
  const stallfree_weight weight = {state.master.data(), state.exp_avg.data(), state.exp_avg_sq.data(), state.steps.data(),
                                   state.deferred.data(), state.every.data(), kChannels, kLength, kSelected, 0};
  stallfree_block block = {};
  block.weights = &weight;
  block.weight_count = 1;
  uint32_t done = 0, gate = 0;
  stallfree_pool* pool;
  stallfree_queue* queue;
  expect(stallfree_pool_create(3, nullptr, 0, 0, stallfree_best_isa(), &pool) == STALLFREE_OK, "a pool is created");
  expect(stallfree_queue_create(pool, &done, &queue) == STALLFREE_OK, "a queue is created");
  std::thread device([&] {
    for (uint32_t window = 1; window <= kWindows; ++window) {
      std::this_thread::yield();
      __atomic_store_n(&gate, window, __ATOMIC_RELEASE);
    }
  });
  for (int window = 0; window < kWindows; ++window) {
    const std::vector<char> bytes = message(block, state, window, &gate);
    expect(stallfree_queue_submit(queue, bytes.data(), 1) == STALLFREE_OK, "a window is submitted");
    stallfree_pool_limit(pool, 1 + window % 3);
    if (window % 7 == 0) expect(stallfree_queue_wait(queue, window + 1, 20000), "a window is done");
  }
  expect(stallfree_queue_wait(queue, kWindows, 20000), "all windows are done");
  expect(__atomic_load_n(&done, __ATOMIC_ACQUIRE) == kWindows, "the word says so");
  uint32_t ticket;
  expect(stallfree_queue_failure(queue, &ticket) == STALLFREE_OK, "none failed");
  device.join();
  stallfree_queue_stop(queue);
  stallfree_queue_destroy(queue);
  stallfree_pool_destroy(pool);
}

}  // namespace

int main() {
  State expected, actual;
  replay_in_turn(expected);
  run_in_queue(actual);
  expect(actual.master == expected.master && actual.exp_avg == expected.exp_avg && actual.exp_avg_sq == expected.exp_avg_sq &&
             actual.steps == expected.steps && actual.slots == expected.slots,
         "the queue gives what the jobs give");
  const std::vector<float> arrived(expected.master.begin(), expected.master.begin() + kSelected * kLength);
  expect(actual.held[0] == arrived && actual.selected == std::vector<int32_t>({0, 1, 2, 3}), "channels arrive");
  std::puts(failures ? "failed" : "all right");
  return failures != 0;
}
