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
      .def("tensors", &SlotPool::tensors, py::arg("slot_idx"), py::arg("plan"), py::arg("num_rows"), py::arg("memory"),
           py::arg("route"))
      .def_property_readonly("was_captured", &SlotPool::was_captured)
      .def_property_readonly("num_free", &SlotPool::num_free);
}

}  // namespace hybrid_ep::bindings
