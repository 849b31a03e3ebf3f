// What the transport asks of its copying process: commands in shared memory, done in order.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

enum class CommandKind : int {
  kMap,     // map the allocation `ipc` of another process; the first is number 0
  kCopy,    // copy from one allocation to another
  kWrite,   // write `value`
  kFence,   // complete all copies before any later one begins
  kFinish,  // count one more as finished when all copies are complete
};

struct Place {
  int allocation;
  uint64_t offset;
};

struct Command {
  CommandKind kind;
  Place to;
  Place from;
  uint64_t value;
  uint64_t num_bytes;
  CUipcMemHandle ipc;
};

// One thread at a time adds commands; the copying process takes them.
struct CopyQueue {
  static constexpr uint64_t kNumSlots = 1024;
  std::atomic<uint64_t> num_added;
  std::atomic<uint64_t> num_taken;
  std::atomic<uint64_t> num_finished;
  Command slots[kNumSlots];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
