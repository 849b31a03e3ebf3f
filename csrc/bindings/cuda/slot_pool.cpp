// Slots of the arena as tensors, each with its own storage, so that any view keeps the slot.
#include "runtime/slot_pool.h"

#include <memory>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/tensors.h"
#include "common/check.h"
#include "runtime/between.h"
#include "runtime/communicator.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

class SlotTensors {
 public:
  // `memory` is what keeps the arena alive; `current_stream` returns the calling thread's stream as an integer.
  SlotTensors(uintptr_t base, int64_t slot_bytes, int num_slots, int device, py::object memory,
              py::object current_stream)
      : base_(base),
        slot_bytes_(slot_bytes),
        device_(device),
        memory_(std::move(memory)),
        pool_(std::make_shared<SlotPool>(num_slots, device, stream_getter(std::move(current_stream), device))) {}

  SlotPool& pool() { return *pool_; }
  const SlotPool& pool() const { return *pool_; }

  // The results of a dispatch as tensors, in the order of DispatchOutput in arena.py; None for what the call has not.
  // - In the slot, with num_rows rows: rows, experts, weights, scales. They hold the slot in place of the taker. An
  //   expert-major call has only the rows here: the other parts are by received row, not by copy.
  // - In the route, which is at `route` in `memory`: rank prefix; of an expert-major call also counts with padding and
  //   the overflow flag. They keep `memory` alive. A call along a known route has none of them.
  py::tuple tensors(int slot_idx, const DispatchPlan& plan, int64_t num_rows, const py::object& memory,
                    uintptr_t route) {
    py::object rank_prefix = py::none(), counts = py::none(), overflow = py::none();
    const bool is_permuted = plan.pad_multiple > 0;
    const py::tuple slot = slot_tensors(slot_idx, plan.format, num_rows, is_permuted);
    if (plan.makes_route) {
      const auto part = [&](int64_t offset, std::vector<int64_t> shape) {
        const uintptr_t address = route + offset * sizeof(int32_t);
        return make_tensor(address, std::move(shape), {kInt, 32}, device_, [memory] {});
      };
      rank_prefix = part(plan.route.rank_prefix, {plan.num_ranks, plan.num_ranks});
      if (is_permuted) {
        counts = part(plan.route.num_tokens_per_expert, {plan.num_experts / plan.num_ranks});
        overflow = part(plan.route.overflow, {1});
      }
    }
    pool_->release(slot_idx);
    return py::make_tuple(slot[0], slot[1], slot[2], slot[3], rank_prefix, counts, overflow);
  }

  // Launches a dispatch of at most `num_rows`, for which a slot must have `slot_bytes`, and returns the tensors;
  // `handle` as in Communicator::dispatch. None: no call was launched. Then slots are smaller, no slot is free, the
  // ranks have agreed on more slots, a tensor that is copied in bulk must be moved, or the stream is being captured.
  py::object dispatch(Communicator& communicator, const DispatchPlan& plan, int64_t slot_bytes, int64_t num_rows,
                      const DispatchTensors& given, const py::object& memory, int handle, cudaStream_t stream) {
    if (slot_bytes > slot_bytes_) return py::none();
    return launch(communicator, plan, given, handle, stream, [&](int slot_idx, uint32_t) -> py::object {
      return tensors(slot_idx, plan, num_rows, memory, reinterpret_cast<uintptr_t>(given.route));
    });
  }

  // Launches a dispatch that makes its route, and waits for its counts. None: no call was launched, as for dispatch().
  // Otherwise what fields_of() returns, the tokens of each local expert, and the tensors. Without fields the call has
  // failed; without tensors the slots of some rank are too small, and no rank has sent.
  py::object dispatch_and_wait(Communicator& communicator, const DispatchPlan& plan, const DispatchTensors& given,
                               int handle, const py::object& memory, cudaStream_t stream) {
    return launch(communicator, plan, given, handle, stream, [&](int slot_idx, uint32_t counts_epoch) -> py::object {
      const HostCounts* found = wait_for_counts(communicator, counts_epoch, stream);
      if (found == nullptr || found->status == kNeedsCapacity) {
        pool_->release(slot_idx);
        return py::make_tuple(fields_of(found), py::none(), py::none());
      }
      const int num_recv = found->num_recv;
      const py::object fields = fields_of(found);
      py::list counts(plan.num_experts / plan.num_ranks);
      for (size_t e = 0; e < counts.size(); ++e) counts[e] = py::int_(found->num_tokens_per_expert[e]);
      return py::make_tuple(fields, counts,
                            tensors(slot_idx, plan, num_recv, memory, reinterpret_cast<uintptr_t>(given.route)));
    });
  }

  // The tensors of a dispatch between domains: rows, experts, weights and scales.
  py::tuple tensors_between(int slot_idx, const DispatchShape& plan, int64_t num_rows) {
    py::tuple slot = slot_tensors(slot_idx, plan.format, num_rows, false);
    pool_->release(slot_idx);
    return slot;
  }

 private:
  // Takes a slot, launches a dispatch into it, and returns launched(slot, epoch of the counts), which gives the slot
  // back. None: no call was launched.
  template <typename Launched>
  py::object launch(Communicator& communicator, const DispatchPlan& plan, const DispatchTensors& given, int handle,
                    cudaStream_t stream, Launched&& launched) {
    const uintptr_t ends = reinterpret_cast<uintptr_t>(given.rows) | reinterpret_cast<uintptr_t>(given.scales);
    if (ends % kRowAlignBytes != 0) return py::none();
    const SlotPool::Taken taken = pool_->take(stream);
    if (taken.slot_idx == 0) return py::none();
    try {
      if (!taken.is_captured && slots_agreed(communicator, stream) <= pool_->num_slots()) {
        return launched(taken.slot_idx, communicator.dispatch(plan, given, handle, taken.slot_idx, 0, stream));
      }
    } catch (...) {
      pool_->release(taken.slot_idx);
      throw;
    }
    pool_->release(taken.slot_idx);
    return py::none();
  }

  static SlotPool::CurrentStream stream_getter(py::object current_stream, int device) {
    return [current_stream = std::move(current_stream), device]() -> std::optional<cudaStream_t> {
      try {
        return stream_of(current_stream(device).cast<uintptr_t>());
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("hybrid_ep: release of a receive slot");
        return std::nullopt;
      }
    };
  }

  // Releases the GIL, because the call may wait for the GPU.
  static int slots_agreed(const Communicator& communicator, cudaStream_t stream) {
    const py::gil_scoped_release release;
    return communicator.slots_agreed_eagerly(stream);
  }

  // Rows, experts, weights and scales in a slot. Each tensor holds the slot.
  py::tuple slot_tensors(int slot_idx, const RowFormat& format, int64_t num_rows, bool is_permuted) {
    const SlotLayout layout = make_slot_layout(format.widths(), slot_bytes_);
    require(num_rows <= layout.capacity, "rows of a result", num_rows, "what a slot holds");
    py::object experts = py::none(), weights = py::none(), scales = py::none();
    py::object rows = slot_tensor(slot_idx, layout.rows, num_rows, format.rows);
    if (!is_permuted) {
      experts = slot_tensor(slot_idx, layout.experts, num_rows, format.experts);
      weights = slot_tensor(slot_idx, layout.weights, num_rows, format.weights);
      scales = slot_tensor(slot_idx, layout.scales, num_rows, format.scales);
    }
    return py::make_tuple(rows, experts, weights, scales);
  }

  py::object slot_tensor(int slot_idx, int64_t offset, int64_t num_rows, const Columns& columns) {
    if (columns.num == 0) return py::none();
    pool_->hold(slot_idx);
    return make_tensor(base_ + slot_idx * slot_bytes_ + offset, {num_rows, columns.num}, columns.type, device_,
                       [pool = pool_, memory = memory_, slot_idx] { pool->release(slot_idx); });
  }

  uintptr_t base_;
  int64_t slot_bytes_;
  int device_;
  py::object memory_;
  std::shared_ptr<SlotPool> pool_;
};

}  // namespace

void add_slot_pool(py::module_& module) {
  py::class_<SlotTensors>(module, "SlotPool")
      .def(py::init<uintptr_t, int64_t, int, int, py::object, py::object>(), py::kw_only(), py::arg("base"),
           py::arg("slot_bytes"), py::arg("num_slots"), py::arg("device"), py::arg("memory"), py::arg("current_stream"))
      .def(
          "take",
          [](SlotTensors& self, uintptr_t stream) {
            const SlotPool::Taken taken = self.pool().take(stream_of(stream));
            return py::make_tuple(taken.slot_idx, taken.is_captured);
          },
          py::arg("stream"))
      .def(
          "note_use", [](SlotTensors& self, uintptr_t stream) { self.pool().note_use(stream_of(stream)); },
          py::arg("stream"))
      .def(
          "release", [](SlotTensors& self, int slot_idx) { self.pool().release(slot_idx); }, py::arg("slot_idx"))
      .def(
          "dispatch",
          [](SlotTensors& self, Communicator& communicator, const DispatchPlan& plan, int64_t slot_bytes,
             int64_t num_rows, Address rows, Address scales, Address topk_idx, Address topk_weights,
             const py::object& memory, uintptr_t route, int handle, uintptr_t stream) {
            return self.dispatch(communicator, plan, slot_bytes, num_rows,
                                 tensors_of(rows, topk_idx, topk_weights, scales, route), memory, handle,
                                 stream_of(stream));
          },
          py::arg("communicator"), py::arg("plan"), py::arg("slot_bytes"), py::arg("num_rows"), py::arg("rows"),
          py::arg("scales"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("memory"), py::arg("route"),
          py::arg("handle"), py::arg("stream"))
      .def(
          "dispatch_and_wait",
          [](SlotTensors& self, Communicator& communicator, const DispatchPlan& plan, Address rows, Address scales,
             Address topk_idx, Address topk_weights, const py::object& memory, uintptr_t route, int handle,
             uintptr_t stream) {
            return self.dispatch_and_wait(communicator, plan, tensors_of(rows, topk_idx, topk_weights, scales, route),
                                          handle, memory, stream_of(stream));
          },
          py::arg("communicator"), py::arg("plan"), py::arg("rows"), py::arg("scales"), py::arg("topk_idx"),
          py::arg("topk_weights"), py::arg("memory"), py::arg("route"), py::arg("handle"), py::arg("stream"))
      .def("tensors", &SlotTensors::tensors, py::arg("slot_idx"), py::arg("plan"), py::arg("num_rows"),
           py::arg("memory"), py::arg("route"))
      .def("tensors_between", &SlotTensors::tensors_between, py::arg("slot_idx"), py::arg("plan"), py::arg("num_rows"))
      .def_property_readonly("was_captured", [](const SlotTensors& self) { return self.pool().was_captured(); })
      .def_property_readonly("num_free", [](const SlotTensors& self) { return self.pool().num_free(); });
}

}  // namespace hybrid_ep::bindings
