// The receive arena as a pool of equal slots, and tensors that are slots.
//
// A dispatch lands in a slot, and its results are tensors over that slot, made through DLPack, each with its own
// storage, so that any view keeps the slot. When the last one dies, an event is recorded on the stream that is then
// current, and the slot goes back; whoever takes it next waits for the event. Slot 0 belongs to nobody: rows land there
// when they are copied out, and partial rows of combine on their way home.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/plan.h"

namespace hybrid_ep {

class SlotPool : public std::enable_shared_from_this<SlotPool> {
 public:
  // `memory` is what keeps the arena alive; `current_stream` returns the calling thread's stream as an integer;
  // `from_dlpack` makes a tensor of a capsule.
  SlotPool(uintptr_t base, int64_t slot_bytes, int num_slots, int device, pybind11::object memory,
           pybind11::object current_stream, pybind11::object from_dlpack);
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

  // A taken slot is held once by its taker; the last release gives it back. Slot 0 is held by nobody.
  void release(int slot_idx);

  // Tensors over what a dispatch wrote, None for what its plan does not have: first rows, experts, weights and scales
  // in its slot, of num_rows rows, which take over the taker's hold (expert-major only rows: the others belong to what
  // arrived, not to its copies); then rank prefix, counts with pads and overflow flag of the route that it made, at
  // `route` in `memory`, which they keep alive (counts and flag expert-major only).
  pybind11::tuple tensors(int slot_idx, const DispatchPlan& plan, int64_t num_rows, const pybind11::object& memory,
                          uintptr_t route);

  int num_free() const;

 private:
  struct Slot {
    int holders = 0;
    bool has_event = false;
    cudaEvent_t event = nullptr;
  };

  void hold(int slot_idx);
  pybind11::object slot_tensor(int slot_idx, int64_t offset, int64_t num_rows, const Columns& columns);
  pybind11::object route_tensor(const pybind11::object& memory, uintptr_t address, std::vector<int64_t> shape);

  mutable std::mutex mutex_;
  uintptr_t base_;
  int64_t slot_bytes_;
  int device_;
  std::vector<Slot> slots_;  // slots_[0] is slot 1
  bool was_captured_ = false;
  pybind11::object memory_, current_stream_, from_dlpack_;
};

}  // namespace hybrid_ep
