// The receive arena as a pool of equal slots: which results hold each, and when it may be used again.
//
// The rows of a dispatch arrive in a slot, and its results are tensors that hold the slot. When the last hold is
// released, an event is recorded on the current stream and the slot is free; its next user waits for the event. No
// result holds slot 0: rows that are copied out arrive there, and partial rows of combine.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace hybrid_ep {

class SlotPool {
 public:
  // Returns the calling thread's stream, or nothing where that is not known. Must not throw.
  using CurrentStream = std::function<std::optional<cudaStream_t>()>;

  // `device` is the GPU of the arena, whatever GPU is current at a call.
  SlotPool(int num_slots, int device, CurrentStream current_stream);
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // Takes a slot and makes `stream` wait for its last users. Returns 0 when all are in use, and always while the stream
  // is captured: the graph would use the slot again without asking.
  int take(cudaStream_t stream);

  // Must be called before a use of slot 0 by `stream` that `take` knows nothing of. Returns whether it is captured.
  bool note_use(cudaStream_t stream);

  // Whether a captured stream used slot 0, so that a graph has its address.
  bool was_captured() const { return was_captured_; }

  // A taken slot is held once by its taker; the last release gives it back. Neither does anything for slot 0. Release
  // runs in tensor destructors and never throws.
  void hold(int slot_idx);
  void release(int slot_idx);

  int num_free() const;

 private:
  struct Slot {
    int holders = 0;
    bool has_event = false;
    bool has_unknown_users = false;  // it was released where no event could be recorded
    cudaEvent_t event = nullptr;
  };

  bool wait_for_users(Slot& slot, cudaStream_t stream) const;
  // Returns whether an event now stands behind what the current stream holds; never throws.
  bool record(cudaEvent_t event) const;

  mutable std::mutex mutex_;
  int device_;
  std::vector<Slot> slots_;  // slots_[0] is slot 1
  bool was_captured_ = false;
  CurrentStream current_stream_;
};

}  // namespace hybrid_ep
