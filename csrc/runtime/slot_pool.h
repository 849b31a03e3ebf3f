// The receive arena as a pool of equal slots: which results hold a slot, and when it may be used again.
//
// The rows of a dispatch arrive in a slot, and its results are tensors that hold the slot. When the last hold is
// released, an event is recorded on the stream of the dispatch, on every stream that `record_stream` has named, and on
// the current stream. Then the slot is free; its next user waits for all of them. So a result may be freed under
// another stream than the one that uses it, as with torch's own memory. No result holds slot 0: rows that are copied
// out arrive there, and partial rows of combine.
//
// A slot that is taken in a capture belongs to the graph until the graph is destroyed: every replay writes it. The same
// capture can take it again after its results have died. No other call can.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "common/capture.h"

namespace hybrid_ep {

class SlotPool {
 public:
  // Returns the current stream of the calling thread, or nothing if it is unknown. Must not throw.
  using CurrentStream = std::function<std::optional<cudaStream_t>()>;

  // `device` is the GPU of the arena, whatever GPU is current at a call.
  SlotPool(int num_slots, int device, CurrentStream current_stream);
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  struct Taken {
    int slot_idx;      // 0: all are in use
    bool is_captured;  // the stream is being captured
  };

  // Takes a slot and makes `stream` wait for its last users.
  Taken take(cudaStream_t stream);

  // Must be called before `stream` uses slot 0 without `take`.
  void note_use(cudaStream_t stream);

  // Whether a captured stream has used a slot. Then a graph may hold its address.
  bool was_captured() const { return was_captured_; }

  // A taken slot is held once by its taker; the last release gives it back. Neither does anything for slot 0. Release
  // runs in tensor destructors and never throws.
  void hold(int slot_idx);
  void release(int slot_idx);
  // Must be called while the slot is held: `stream` uses it, too.
  void record_stream(int slot_idx, cudaStream_t stream);

  int num_slots() const { return static_cast<int>(slots_.size()); }  // without slot 0
  int num_free() const;

 private:
  struct Slot {
    int holders = 0;
    std::vector<cudaStream_t> streams;  // that use it: the first took it, and the last was current at the release
    bool has_unknown_users = false;     // an event could not be recorded when it was released
    std::vector<cudaEvent_t> events;    // one for each of the most streams so far
    int num_events = 0;                 // that were recorded at the last release
    unsigned long long capture_id = 0;  // of the graph that the slot belongs to; 0: it belongs to none
    GraphEnd graph_end;
  };

  int take_eager(cudaStream_t stream);
  int take_captured(cudaStream_t stream, const Capture& capture);
  bool wait_for_users(Slot& slot, cudaStream_t stream) const;
  // Records an event on each stream of a slot; returns how many, or nothing if that did not work. Never throws. The
  // streams must be of the slot's capture, or of none where it has none.
  std::optional<int> record(Slot& slot) const;

  mutable std::mutex mutex_;
  int device_;
  std::vector<Slot> slots_;  // slots_[0] is slot 1
  bool was_captured_ = false;
  CurrentStream current_stream_;
};

}  // namespace hybrid_ep
