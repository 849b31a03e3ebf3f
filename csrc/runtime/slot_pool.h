// The receive arena as a pool of equal slots, and tensors that are slots.
//
// A dispatch lands in a slot, and its results are handed to Python as DLPack capsules over that slot: each becomes a
// tensor with its own storage, so that any view keeps the slot. When the last one dies, an event is recorded on the
// stream that is then current, and the slot goes back; whoever takes it next waits for the event. Slot 0 is never
// handed out: rows land there when they are copied out, and partial rows of combine on their way home.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace hybrid_ep {

class SlotPool : public std::enable_shared_from_this<SlotPool> {
 public:
  // `memory` is what keeps the arena alive; `current_stream` returns the calling thread's stream as an integer.
  SlotPool(uintptr_t base, int64_t slot_bytes, int num_slots, int device, pybind11::object memory,
           pybind11::object current_stream);
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // Takes a slot and makes `stream` wait for its last users. Returns 0 when all are in use.
  int take(cudaStream_t stream);

  // A taken slot is held once by its taker; the last release gives it back.
  void hold(int slot_idx);
  void release(int slot_idx);

  // A DLPack capsule over bytes of a slot, contiguous, that holds it. `code` and `bits` are DLPack's.
  pybind11::capsule tensor(int slot_idx, int64_t offset, const std::vector<int64_t>& shape, int code, int bits);

  int num_free() const;
  int64_t slot_bytes() const { return slot_bytes_; }

 private:
  struct Slot {
    int holders = 0;
    bool has_event = false;
    cudaEvent_t event = nullptr;
  };

  mutable std::mutex mutex_;
  uintptr_t base_;
  int64_t slot_bytes_;
  int device_;
  std::vector<Slot> slots_;  // slots_[0] is slot 1
  pybind11::object memory_, current_stream_;
};

}  // namespace hybrid_ep
