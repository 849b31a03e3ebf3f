#include "runtime/slot_pool.h"

#include "bindings/cuda/bindings.h"

namespace hybrid_ep::bindings {

void add_slot_pool(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<SlotPool, std::shared_ptr<SlotPool>>(module, "SlotPool")
      .def(py::init<uintptr_t, int64_t, int, int, py::object, py::object, py::object>(), py::kw_only(), py::arg("base"),
           py::arg("slot_bytes"), py::arg("num_slots"), py::arg("device"), py::arg("memory"), py::arg("current_stream"),
           py::arg("from_dlpack"))
      .def(
          "take", [](SlotPool& pool, uintptr_t stream) { return pool.take(stream_of(stream)); }, py::arg("stream"))
      .def(
          "note_use", [](SlotPool& pool, uintptr_t stream) { pool.note_use(stream_of(stream)); }, py::arg("stream"))
      .def("release", &SlotPool::release, py::arg("slot_idx"))
      .def(
          "tensors",
          [](SlotPool& pool, int slot_idx, const DispatchPlan& plan, int64_t num_rows, int64_t num_recv) {
            return pool.tensors(slot_idx, plan.format, num_rows, num_recv);
          },
          py::arg("slot_idx"), py::arg("plan"), py::arg("num_rows"), py::arg("num_recv"))
      .def_property_readonly("was_captured", &SlotPool::was_captured)
      .def_property_readonly("num_free", &SlotPool::num_free);
  module.def(
      "int32_capsule",
      [](py::object memory, uintptr_t address, const std::vector<int64_t>& shape, int device) {
        return make_capsule(address, shape, {kInt, 32}, device, [memory = std::move(memory)] {});
      },
      py::arg("memory"), py::arg("address"), py::arg("shape"), py::arg("device"));
}

}  // namespace hybrid_ep::bindings
