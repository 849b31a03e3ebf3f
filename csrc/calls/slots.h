// The slots of the receive arena: leases for dispatches, and their contents as tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/communicator.h"
#include "runtime/slot_pool.h"

namespace hybrid_ep::calls {

// The tensors that a dispatch wrote to a slot, a row for each received row; None for what the call has not. Each has a
// storage of its own that holds the slot, so that any view keeps it.
struct SlotResults {
  pybind11::object rows, experts, weights, scales;
};

// The slots of one piece of symmetric memory, which serve until the arena gets other memory.
class SlotMemory {
 public:
  // `memory` is what keeps the memory alive; `current_stream` as CurrentStream takes it.
  SlotMemory(uintptr_t base, int64_t slot_bytes, int num_slots, int device, pybind11::object memory,
             pybind11::object current_stream);

  SlotPool& pool() { return *pool_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  // Does as SlotPool::record_stream for the slot that has this address; nothing for any other memory.
  void record_stream(uintptr_t address, cudaStream_t stream);
  // The results in a slot with `num_rows` rows. By expert, only the rows are for the caller: the other parts of the
  // slot are of received rows, and not of copies.
  SlotResults results(int slot_idx, const DispatchShape& plan, int64_t num_rows, bool is_by_expert);

 private:
  pybind11::object part(int slot_idx, int64_t offset, int64_t num_rows, const Columns& columns);

  uintptr_t base_;
  int64_t slot_bytes_;
  int device_;
  pybind11::object memory_;
  std::shared_ptr<SlotPool> pool_;
};

// A slot for the rows of one dispatch. Its end frees the slot, unless results hold it.
class SlotLease {
 public:
  SlotLease(std::shared_ptr<SlotMemory> memory, SlotPool::Taken taken, int slots_wanted)
      : memory_(std::move(memory)), taken_(taken), slots_wanted_(slots_wanted) {}
  SlotLease(SlotLease&&) noexcept = default;
  SlotLease& operator=(SlotLease&& other) noexcept {
    give_back();
    memory_ = std::move(other.memory_);
    taken_ = other.taken_;
    slots_wanted_ = other.slots_wanted_;
    return *this;
  }
  ~SlotLease() { give_back(); }

  int slot_idx() const { return taken_.slot_idx; }  // 0: none was free
  bool is_captured() const { return taken_.is_captured; }
  int slots_wanted() const { return slots_wanted_; }  // as Communicator::dispatch takes it
  // What a dispatch wrote; at most once. The results hold the slot, or are copies of what is in slot 0.
  SlotResults results(const DispatchShape& plan, int64_t num_rows, bool is_by_expert);
  // May be called again.
  void give_back();

 private:
  std::shared_ptr<SlotMemory> memory_;  // nullptr: given back
  SlotPool::Taken taken_;
  int slots_wanted_;
};

// The slots of an engine. Its arena, an Arena of hybrid_ep/engine/cuda/arena.py, gives them memory, and grows when the
// ranks have agreed on more slots.
class Slots {
 public:
  // `arena` owns this object. `unfreed` is a list of what could not be freed while a graph was captured; it is emptied
  // outside of captures.
  Slots(pybind11::handle arena, const Communicator& communicator, pybind11::list unfreed)
      : arena_(arena), communicator_(communicator), unfreed_(std::move(unfreed)) {}

  // Names the memory of later leases. `more_slots`: how many slots the arena would have after a growth; 0: no more.
  void use(std::shared_ptr<SlotMemory> memory, int more_slots) {
    memory_ = std::move(memory);
    more_slots_ = more_slots;
  }
  // A slot for the next dispatch on `stream`. Collective where the ranks have agreed on more slots.
  SlotLease lease(cudaStream_t stream);
  // Makes slots so large that `num_bytes` fit. Collective where they grow; then `compare`, a function of Python, is
  // called first (None: the ranks have compared their calls). Throws ConfigError in a capture.
  void ensure(int64_t num_bytes, const pybind11::object& compare) const;
  // Throws ConfigError if slots would have to grow for `num_bytes` and a graph is being captured.
  void require_growth_is_possible(int64_t num_bytes) const;
  int64_t slot_bytes() const { return memory_->slot_bytes(); }
  // Must be called before `stream` uses slot 0 without a lease.
  void note_use(cudaStream_t stream) { memory_->pool().note_use(stream); }

 private:
  pybind11::handle arena_;
  const Communicator& communicator_;
  pybind11::list unfreed_;
  std::shared_ptr<SlotMemory> memory_;
  int more_slots_ = 0;
  bool has_copied_ = false;  // a result was copied because no slot was free, which the next dispatch publishes
};

}  // namespace hybrid_ep::calls
