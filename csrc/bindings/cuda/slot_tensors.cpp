#include "bindings/cuda/slot_tensors.h"

#include <utility>
#include <vector>

#include "bindings/cuda/bindings.h"
#include "bindings/cuda/current_stream.h"
#include "bindings/cuda/tensors.h"
#include "common/check.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

SlotPool::CurrentStream stream_getter(CurrentStream current) {
  return [current = std::move(current)]() -> std::optional<cudaStream_t> {
    try {
      return current.get();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("hybrid_ep: release of a receive slot");
      return std::nullopt;
    }
  };
}

// Releases the GIL, because the call may wait for the GPU.
int slots_agreed(const Communicator& communicator, cudaStream_t stream) {
  const py::gil_scoped_release release;
  return communicator.slots_agreed_eagerly(stream);
}

}  // namespace

FilledSlot::~FilledSlot() {
  if (slots_ != nullptr) slots_->pool().release(slot_idx_);
}

SlotResults FilledSlot::tensors(const DispatchPlan& plan, int64_t num_rows, const py::object& memory, uintptr_t route) {
  SlotResults results = slots_->tensors(slot_idx_, plan, num_rows, memory, route);
  slots_ = nullptr;
  return results;
}

py::tuple SlotResults::as_tuple() const {
  return py::make_tuple(rows, experts, weights, scales, rank_prefix, counts, overflow);
}

SlotTensors::SlotTensors(uintptr_t base, int64_t slot_bytes, int num_slots, int device, py::object memory,
                         py::object current_stream)
    : base_(base),
      slot_bytes_(slot_bytes),
      device_(device),
      memory_(std::move(memory)),
      pool_(std::make_shared<SlotPool>(num_slots, device,
                                       stream_getter(CurrentStream(device, std::move(current_stream))))) {}

void SlotTensors::record_stream(uintptr_t address, cudaStream_t stream) {
  const auto slot_idx = static_cast<int64_t>((address - base_) / static_cast<uintptr_t>(slot_bytes_));
  if (address >= base_ && slot_idx <= pool_->num_slots()) pool_->record_stream(static_cast<int>(slot_idx), stream);
}

SlotResults SlotTensors::tensors(int slot_idx, const DispatchPlan& plan, int64_t num_rows, const py::object& memory,
                                 uintptr_t route) {
  const bool is_permuted = plan.pad_multiple > 0;
  SlotResults results = slot_tensors(slot_idx, plan, num_rows, is_permuted);
  if (plan.makes_route) {
    const auto part = [&](int64_t offset, std::vector<int64_t> shape, ElementType type = {kInt, 32}) {
      const uintptr_t address = route + offset * sizeof(int32_t);
      return make_tensor(address, std::move(shape), type, device_, [memory] {});
    };
    results.rank_prefix = part(plan.route.rank_prefix, {plan.num_ranks, plan.num_ranks});
    if (is_permuted) {
      results.counts = part(plan.route.returned_counts, {plan.num_experts / plan.num_ranks}, {kInt, 64});
      results.overflow = part(plan.route.overflow, {1});
    }
  }
  pool_->release(slot_idx);
  return results;
}

SlotResults SlotTensors::tensors_between(int slot_idx, const DispatchShape& plan, int64_t num_rows) {
  SlotResults results = slot_tensors(slot_idx, plan, num_rows, false);
  pool_->release(slot_idx);
  return results;
}

std::optional<FilledSlot> SlotTensors::launch(Communicator& communicator, const DispatchPlan& plan,
                                              const DispatchTensors& given, int handle, cudaStream_t stream) {
  const uintptr_t ends = reinterpret_cast<uintptr_t>(given.rows) | reinterpret_cast<uintptr_t>(given.scales);
  if (ends % kRowAlignBytes != 0) return std::nullopt;
  const SlotPool::Taken taken = pool_->take(stream);
  if (taken.slot_idx == 0) return std::nullopt;
  FilledSlot slot(*this, taken.slot_idx);
  if (taken.is_captured || slots_agreed(communicator, stream) > pool_->num_slots()) return std::nullopt;
  slot.counts_epoch = communicator.dispatch(plan, given, handle, taken.slot_idx, 0, stream);
  return slot;
}

SlotResults SlotTensors::slot_tensors(int slot_idx, const DispatchShape& plan, int64_t num_rows, bool is_permuted) {
  const RowFormat& format = plan.format;
  const SlotLayout layout = plan.slot_layout(slot_bytes_);
  require(num_rows <= layout.capacity, "rows of a result", num_rows, "what a slot holds");
  const py::none none;
  SlotResults results{none, none, none, none, none, none, none};
  results.rows = slot_tensor(slot_idx, layout.rows, num_rows, format.rows);
  if (!is_permuted) {
    results.experts = slot_tensor(slot_idx, layout.experts, num_rows, format.experts);
    results.weights = slot_tensor(slot_idx, layout.weights, num_rows, format.weights);
    results.scales = slot_tensor(slot_idx, layout.scales, num_rows, format.scales);
  }
  return results;
}

py::object SlotTensors::slot_tensor(int slot_idx, int64_t offset, int64_t num_rows, const Columns& columns) {
  if (columns.num == 0) return py::none();
  pool_->hold(slot_idx);
  return make_tensor(base_ + slot_idx * slot_bytes_ + offset, {num_rows, columns.num}, columns.type, device_,
                     [pool = pool_, memory = memory_, slot_idx] { pool->release(slot_idx); });
}

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
          "record_stream",
          [](SlotTensors& self, uintptr_t address, uintptr_t stream) {
            self.record_stream(address, stream_of(stream));
          },
          py::arg("address"), py::arg("stream"))
      .def(
          "release", [](SlotTensors& self, int slot_idx) { self.pool().release(slot_idx); }, py::arg("slot_idx"))
      .def(
          "tensors",
          [](SlotTensors& self, int slot_idx, const DispatchPlan& plan, int64_t num_rows, const py::object& memory,
             uintptr_t route) { return self.tensors(slot_idx, plan, num_rows, memory, route).as_tuple(); },
          py::arg("slot_idx"), py::arg("plan"), py::arg("num_rows"), py::arg("memory"), py::arg("route"))
      .def(
          "tensors_between",
          [](SlotTensors& self, int slot_idx, const DispatchShape& plan, int64_t num_rows) {
            return self.tensors_between(slot_idx, plan, num_rows).as_tuple();
          },
          py::arg("slot_idx"), py::arg("plan"), py::arg("num_rows"))
      .def_property_readonly("was_captured", [](const SlotTensors& self) { return self.pool().was_captured(); })
      .def_property_readonly("num_free", [](const SlotTensors& self) { return self.pool().num_free(); });
}

}  // namespace hybrid_ep::bindings
