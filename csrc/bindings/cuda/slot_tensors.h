// Slots of the arena as tensors, each with its own storage, so that any view keeps the slot.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "runtime/communicator.h"
#include "runtime/slot_pool.h"

namespace hybrid_ep::bindings {

// The results of a dispatch, in the order of DispatchOutput in arena.py; None for what the call has not.
struct SlotResults {
  pybind11::object rows, experts, weights, scales, rank_prefix, counts, overflow;

  pybind11::tuple as_tuple() const;
};

class SlotTensors;

// A slot that a dispatch was launched into, while its results are not made. Its end releases the slot.
class FilledSlot {
 public:
  FilledSlot(SlotTensors& slots, int slot_idx) : slots_(&slots), slot_idx_(slot_idx) {}
  FilledSlot(FilledSlot&& other) noexcept
      : counts_epoch(other.counts_epoch), slots_(std::exchange(other.slots_, nullptr)), slot_idx_(other.slot_idx_) {}
  FilledSlot& operator=(FilledSlot&&) = delete;
  ~FilledSlot();

  int slot_idx() const { return slot_idx_; }
  // As SlotTensors::tensors; at most once. The results hold the slot.
  SlotResults tensors(const DispatchPlan& plan, int64_t num_rows, const pybind11::object& memory, uintptr_t route);

  uint32_t counts_epoch = 0;  // as Communicator::dispatch returns it

 private:
  SlotTensors* slots_;
  int slot_idx_;
};

class SlotTensors {
 public:
  // `memory` is what keeps the arena alive; `current_stream` as CurrentStream takes it.
  SlotTensors(uintptr_t base, int64_t slot_bytes, int num_slots, int device, pybind11::object memory,
              pybind11::object current_stream);

  SlotPool& pool() { return *pool_; }
  const SlotPool& pool() const { return *pool_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  // Does as SlotPool::record_stream for the slot that has this address; nothing for any other memory.
  void record_stream(uintptr_t address, cudaStream_t stream);

  // The results of a dispatch.
  // - In the slot, with num_rows rows: rows, experts, weights, scales. They hold the slot in place of the taker. An
  //   expert-major call has only the rows here: the other parts are by received row, not by copy.
  // - In the route, which is at `route` in `memory`: rank prefix; of an expert-major call also counts with padding and
  //   the overflow flag. They keep `memory` alive. A call along a known route has none of them.
  SlotResults tensors(int slot_idx, const DispatchPlan& plan, int64_t num_rows, const pybind11::object& memory,
                      uintptr_t route);
  // The same of a dispatch between domains, without those of the route.
  SlotResults tensors_between(int slot_idx, const DispatchShape& plan, int64_t num_rows);

  // Takes a slot, and launches a dispatch into it; `handle` as in Communicator::dispatch. nullopt: no call was
  // launched. Then no slot is free, the ranks have agreed on more slots, a tensor that is copied in bulk must be moved,
  // or the stream is being captured.
  std::optional<FilledSlot> launch(Communicator& communicator, const DispatchPlan& plan, const DispatchTensors& given,
                                   int handle, cudaStream_t stream);

 private:
  // Rows, experts, weights and scales in a slot. Each tensor holds the slot.
  SlotResults slot_tensors(int slot_idx, const DispatchShape& plan, int64_t num_rows, bool is_permuted);
  pybind11::object slot_tensor(int slot_idx, int64_t offset, int64_t num_rows, const Columns& columns);

  uintptr_t base_;
  int64_t slot_bytes_;
  int device_;
  pybind11::object memory_;
  std::shared_ptr<SlotPool> pool_;
};

}  // namespace hybrid_ep::bindings
