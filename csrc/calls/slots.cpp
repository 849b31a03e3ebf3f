#include "calls/slots.h"

#include <optional>
#include <utility>
#include <vector>

#include "bindings/cuda/bindings.h"
#include "bindings/cuda/current_stream.h"
#include "bindings/cuda/tensors.h"
#include "common/check.h"

namespace hybrid_ep::calls {
namespace {

namespace py = pybind11;
using bindings::stream_of;

SlotPool::CurrentStream stream_getter(bindings::CurrentStream current) {
  return [current = std::move(current)]() -> std::optional<cudaStream_t> {
    try {
      return current.get();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("hybrid_ep: release of a receive slot");
      return std::nullopt;
    }
  };
}

}  // namespace

SlotMemory::SlotMemory(uintptr_t base, int64_t slot_bytes, int num_slots, int device, py::object memory,
                       py::object current_stream)
    : base_(base),
      slot_bytes_(slot_bytes),
      device_(device),
      memory_(std::move(memory)),
      pool_(std::make_shared<SlotPool>(num_slots, device,
                                       stream_getter(bindings::CurrentStream(device, std::move(current_stream))))) {}

void SlotMemory::record_stream(uintptr_t address, cudaStream_t stream) {
  const auto slot_idx = static_cast<int64_t>((address - base_) / static_cast<uintptr_t>(slot_bytes_));
  if (address >= base_ && slot_idx <= pool_->num_slots()) pool_->record_stream(static_cast<int>(slot_idx), stream);
}

SlotResults SlotMemory::results(int slot_idx, const DispatchShape& plan, int64_t num_rows, bool is_by_expert) {
  const RowFormat& format = plan.format;
  const SlotLayout layout = plan.slot_layout(slot_bytes_);
  require(num_rows <= layout.capacity, "rows of a result", num_rows, "what a slot holds");
  const py::none none;
  SlotResults results{part(slot_idx, layout.rows, num_rows, format.rows), none, none, none};
  if (!is_by_expert) {
    results.experts = part(slot_idx, layout.experts, num_rows, format.experts);
    results.weights = part(slot_idx, layout.weights, num_rows, format.weights);
    results.scales = part(slot_idx, layout.scales, num_rows, format.scales);
  }
  return results;
}

py::object SlotMemory::part(int slot_idx, int64_t offset, int64_t num_rows, const Columns& columns) {
  if (columns.num == 0) return py::none();
  pool_->hold(slot_idx);
  return bindings::make_tensor(base_ + slot_idx * slot_bytes_ + offset, {num_rows, columns.num}, columns.type, device_,
                               [pool = pool_, memory = memory_, slot_idx] { pool->release(slot_idx); });
}

SlotResults SlotLease::results(const DispatchShape& plan, int64_t num_rows, bool is_by_expert) {
  SlotResults results = memory_->results(taken_.slot_idx, plan, num_rows, is_by_expert);
  if (taken_.slot_idx == 0) {
    for (py::object* part : {&results.rows, &results.experts, &results.weights, &results.scales}) {
      if (!part->is_none()) *part = part->attr("clone")();
    }
  }
  give_back();
  return results;
}

void SlotLease::give_back() {
  if (const auto memory = std::exchange(memory_, nullptr)) memory->pool().release(taken_.slot_idx);
}

SlotLease Slots::lease(cudaStream_t stream) {
  int agreed = 0;
  {
    const py::gil_scoped_release release;  // it may wait for the GPU
    agreed = communicator_.slots_agreed(stream);
  }
  if (agreed > memory_->pool().num_slots()) arena_.attr("grow_pool")(agreed);
  const SlotPool::Taken taken = memory_->pool().take(stream);
  has_copied_ |= taken.slot_idx == 0;
  if (taken.is_captured) return SlotLease(memory_, taken, Communicator::kInGraph);
  if (!unfreed_.empty()) unfreed_.attr("clear")();
  return SlotLease(memory_, taken, std::exchange(has_copied_, false) ? more_slots_ : 0);
}

void Slots::ensure(int64_t num_bytes, const py::object& compare) const { arena_.attr("ensure")(num_bytes, compare); }

void Slots::require_growth_is_possible(int64_t num_bytes) const {
  if (num_bytes > memory_->slot_bytes()) arena_.attr("holds")(num_bytes);
}

void add_slots(py::module_& module) {
  py::class_<SlotMemory, std::shared_ptr<SlotMemory>>(module, "SlotMemory")
      .def(py::init<uintptr_t, int64_t, int, int, py::object, py::object>(), py::kw_only(), py::arg("base"),
           py::arg("slot_bytes"), py::arg("num_slots"), py::arg("device"), py::arg("memory"), py::arg("current_stream"))
      .def(
          "record_stream",
          [](SlotMemory& self, uintptr_t address, uintptr_t stream) { self.record_stream(address, stream_of(stream)); },
          py::arg("address"), py::arg("stream"))
      .def_property_readonly("was_captured", [](SlotMemory& self) { return self.pool().was_captured(); })
      .def_property_readonly("num_free", [](SlotMemory& self) { return self.pool().num_free(); });
  py::class_<SlotLease>(module, "SlotLease")
      .def_property_readonly("slot_idx", &SlotLease::slot_idx)
      .def_property_readonly("is_captured", &SlotLease::is_captured)
      .def(
          "results",
          [](SlotLease& self, const DispatchShape& plan, int64_t num_rows) {
            const SlotResults results = self.results(plan, num_rows, /*is_by_expert=*/false);
            return py::make_tuple(results.rows, results.scales, results.experts, results.weights);
          },
          py::arg("plan"), py::arg("num_rows"))
      .def("give_back", &SlotLease::give_back);
  py::class_<Slots>(module, "Slots")
      .def(py::init<py::handle, const Communicator&, py::list>(), py::arg("arena"), py::arg("communicator"),
           py::arg("unfreed"), py::keep_alive<1, 3>())
      .def("use", &Slots::use, py::arg("memory"), py::arg("more_slots"))
      .def(
          "lease", [](Slots& self, uintptr_t stream) { return self.lease(stream_of(stream)); }, py::arg("stream"))
      .def("note_use", [](Slots& self, uintptr_t stream) { self.note_use(stream_of(stream)); }, py::arg("stream"));
}

}  // namespace hybrid_ep::calls
