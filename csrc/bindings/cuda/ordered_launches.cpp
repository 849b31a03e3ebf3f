#include "bindings/cuda/ordered_launches.h"

#include <cstdint>

#include "bindings/cuda/bindings.h"

namespace hybrid_ep::bindings {

void add_ordered_launches(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<OrderedLaunches>(module, "LaunchOrder")
      .def(py::init<int, py::object>(), py::arg("device"), py::arg("current_stream"))
      .def(
          "begin",
          [](OrderedLaunches& self, bool is_low_latency) {
            const cudaStream_t stream = self.current();
            is_low_latency ? self.order().begin_low_latency(stream) : self.order().begin(stream);
            return reinterpret_cast<uintptr_t>(stream);
          },
          py::kw_only(), py::arg("is_low_latency") = false)
      .def("end", [](OrderedLaunches& self) { self.order().end(); });
}

}  // namespace hybrid_ep::bindings
