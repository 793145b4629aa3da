// What queue.cpp does with channels that change hands.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "jobs.h"
#include "queue.h"

namespace stallfree {

inline void convert(const float* from, float* to, int64_t count) { std::copy_n(from, count, to); }

// To the nearest, ties to even; NaN becomes 0x7fc0.
inline void convert(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

inline void convert(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

// Channels that change hands: rows of those that leave go from `state` to the host's arrays, then arriving ones to their places.
class Merge {
 public:
  Merge(const stallfree_block& block, const stallfree_exchange& exchange) : block_(block), exchange_(exchange) {
    for (int32_t w = 0; w < block.weight_count; ++w) {
      const stallfree_weight& weight = block.weights[w];
      places_ += weight.selected;
      rows_ += weight.channels - weight.selected;
    }
    const int32_t* const moved = exchange.numbers + places_ + rows_;
    int64_t place = 0, offset = 0;
    for (int32_t w = 0; w < block.weight_count; ++w) {
      for (int64_t i = 0; i < block.weights[w].selected; ++i, ++place, offset += block.weights[w].length) {
        if (moved[place]) moves_.push_back({&block.weights[w], place, offset});
      }
    }
  }

  int32_t run(stallfree_pool* pool) {
    for (const Move& move : moves_) {
      const int64_t arriving = exchange_.numbers[move.place], leaving = exchange_.selected[move.place];
      const int64_t channels = move.weight->channels;
      if (arriving < 0 || arriving >= channels || leaving >= channels) return STALLFREE_BAD_ROWS;
    }
    for (leaves_ = true;; leaves_ = false) {
      next_ = 0;
      run_on(pool, [](void* context, int) { static_cast<Merge*>(context)->work(); }, this, moves_.size());
      if (!leaves_) break;
    }
    const int32_t* deferred = exchange_.numbers + places_;
    for (int32_t w = 0; w < block_.weight_count; ++w) {
      const int64_t rows = block_.weights[w].channels - block_.weights[w].selected;
      std::copy_n(deferred, rows, block_.weights[w].deferred);
      deferred += rows;
    }
    std::copy_n(exchange_.numbers, places_, exchange_.selected);
    return STALLFREE_OK;
  }

 private:
  struct Move {
    const stallfree_weight* weight;
    int64_t place, offset;
  };

  void work() {
    for (;;) {
      const size_t mine = next_.fetch_add(1, std::memory_order_relaxed);
      if (mine >= moves_.size()) return;
      const Move& move = moves_[mine];
      const int64_t channel = leaves_ ? exchange_.selected[move.place] : exchange_.numbers[move.place];
      if (channel < 0) continue;
      move_rows(exchange_.state[0], move.weight->master, STALLFREE_F32, move, channel);
      move_rows(exchange_.state[1], move.weight->exp_avg, block_.moment_dtype, move, channel);
      move_rows(exchange_.state[2], move.weight->exp_avg_sq, block_.moment_dtype, move, channel);
      int32_t &ours = exchange_.state_steps[move.place], &theirs = move.weight->steps[channel];
      (leaves_ ? theirs : ours) = leaves_ ? ours : theirs;
    }
  }

  void move_rows(float* state, void* host, int32_t dtype, const Move& move, int64_t channel) const {
    const int64_t length = move.weight->length;
    const auto copy = [&](auto* theirs) {
      theirs += channel * length;
      leaves_ ? convert(state + move.offset, theirs, length) : convert(theirs, state + move.offset, length);
    };
    dtype == STALLFREE_F32 ? copy(static_cast<float*>(host)) : copy(static_cast<uint16_t*>(host));
  }

  const stallfree_block& block_;
  const stallfree_exchange& exchange_;
  int64_t places_ = 0, rows_ = 0;
  std::vector<Move> moves_;
  bool leaves_ = true;
  std::atomic<size_t> next_{0};
};

}  // namespace stallfree
