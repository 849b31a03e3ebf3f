// The one way to wait for another rank or CTA: poll, look at the clock, and give up with a record of who is missing.
//
// The deadline is the kernel's, not the wait's: once it has passed, every later wait of the kernel polls once and gives
// up, so that a kernel always ends within its time however many waits it has. A kernel whose wait failed goes on to its
// end in order and leaves its barriers and epochs as a successful one does.
#pragma once

#include "device/ptx/memory.cuh"
#include "layout/fault.h"

namespace hybrid_ep {

// Writes the record unless an earlier fault has. Any thread.
__device__ inline void report_fault(FaultRecord* record, FaultKind kind, KernelName kernel, WaitTag tag, int rank,
                                    int peer, int64_t expected, int64_t seen) {
  if (atomicCAS_system(&record->claimed, 0u, 1u) != 0u) return;
  record->kind = kind;
  record->kernel = kernel;
  record->tag = tag;
  record->rank = rank;
  record->peer = peer;
  record->expected = expected;
  record->seen = seen;
  ptx::store_release_system(&record->written, 1u);
}

class Waiter {
 public:
  __device__ Waiter(FaultRecord* record, KernelName kernel, int rank, uint64_t timeout_ns)
      : record_(record), kernel_(kernel), rank_(rank), deadline_(ptx::clock_ns() + timeout_ns) {}

  // Waits until *flag, written by another GPU, has reached `epoch` (epochs wrap). Acquires at system scope.
  __device__ bool until_epoch(const uint32_t* flag, uint32_t epoch, int peer, WaitTag tag) const {
    uint32_t seen;
    while (static_cast<int32_t>((seen = ptx::load_acquire_system(flag)) - epoch) < 0) {
      if (expired()) return give_up(peer, tag, epoch, seen);
    }
    return true;
  }

  // The same for a flag that brings a value along, which it writes to *value: the epoch is the lower half of the word.
  __device__ bool until_epoch(const uint64_t* flag, uint32_t epoch, int peer, WaitTag tag, uint32_t* value) const {
    uint64_t seen;
    while (static_cast<int32_t>(static_cast<uint32_t>(seen = ptx::load_acquire_system(flag)) - epoch) < 0) {
      if (expired()) return give_up(peer, tag, epoch, static_cast<uint32_t>(seen));
    }
    *value = static_cast<uint32_t>(seen >> 32);
    return true;
  }

  // Waits until *counter, written by CTAs of this GPU, is `count`. Acquires at GPU scope.
  __device__ bool until_count(const uint32_t* counter, uint32_t count, WaitTag tag) const {
    uint32_t seen;
    while ((seen = ptx::load_acquire_gpu(counter)) < count) {
      if (expired()) return give_up(rank_, tag, count, seen);
    }
    return true;
  }

 private:
  __device__ bool expired() const { return ptx::clock_ns() > deadline_; }

  __device__ __noinline__ bool give_up(int peer, WaitTag tag, uint32_t expected, uint32_t seen) const {
    report_fault(record_, FaultKind::kTimeout, kernel_, tag, rank_, peer, expected, seen);
    return false;
  }

  FaultRecord* record_;
  KernelName kernel_;
  int rank_;
  uint64_t deadline_;
};

}  // namespace hybrid_ep
