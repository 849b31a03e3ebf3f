#include "bindings/cuda/topk_probs.h"

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "common/device_guard.h"
#include "kernels/launch.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

int num_rows(PyObject* tensor) {
  const Py_ssize_t num = PyObject_Size(tensor);
  if (num < 0) throw py::error_already_set();
  return static_cast<int>(num);
}

}  // namespace

TopkProbs::TopkProbs(int num_topk, int num_experts, const py::object& device, int device_index,
                     py::object current_stream, bool by_python)
    : num_topk_(num_topk),
      num_experts_(num_experts),
      make_topk_idx_({0, num_topk}, {num_topk, 1}, dtype_of("int64"), device, by_python),
      make_weights_({0, num_topk}, {num_topk, 1}, dtype_of("float32"), device, by_python),
      make_probs_({0, num_experts}, {num_experts, 1}, dtype_of("float32"), device, by_python),
      device_(device_index),
      stream_(device_index, std::move(current_stream)) {}

py::object TopkProbs::to_weights(FastArguments arguments) const {
  const int num_tokens = num_rows(arguments[0]);
  uintptr_t weights_at = 0;
  py::object weights = make_weights_.make_rows(num_tokens, &weights_at);
  const DeviceGuard guard(device_);
  launch_probs_to_weights({pointer<int64_t>(address_of(arguments[0])), nullptr, pointer<float>(weights_at),
                           pointer<float>(address_of(arguments[1])), num_tokens, num_topk_, num_experts_, false},
                          stream_.get());
  return weights;
}

std::pair<py::object, py::object> TopkProbs::sum_weights_and_copy(FastArguments arguments) const {
  uintptr_t copy_at = 0;
  py::object copy = make_topk_idx_.make_rows(num_rows(arguments[0]), &copy_at);
  return {to_probs(arguments, /*adds_columns=*/true, copy_at), std::move(copy)};
}

py::object TopkProbs::to_probs(FastArguments arguments, bool adds_columns, uintptr_t copy_at) const {
  const int num_tokens = num_rows(arguments[0]);
  uintptr_t probs_at = 0;
  py::object probs = make_probs_.make_rows(num_tokens, &probs_at);
  const DeviceGuard guard(device_);
  launch_weights_to_probs(
      {pointer<int64_t>(address_of(arguments[0])), pointer<int64_t>(copy_at), pointer<float>(address_of(arguments[1])),
       pointer<float>(probs_at), num_tokens, num_topk_, num_experts_, adds_columns},
      stream_.get());
  return probs;
}

void add_topk_probs(py::module_& module) {
  py::class_<TopkProbs>(module, "TopkProbs")
      .def(py::init<int, int, const py::object&, int, py::object, bool>(), py::kw_only(), py::arg("num_topk"),
           py::arg("num_experts"), py::arg("device"), py::arg("device_index"), py::arg("current_stream"),
           py::arg("by_python") = false)
      .def_property_readonly("sum_weights", &fast_call<&TopkProbs::sum_weights, 2>)
      .def_property_readonly("place_weights", &fast_call<&TopkProbs::place_weights, 2>)
      .def_property_readonly("to_weights", &fast_call<&TopkProbs::to_weights, 2>);
}

}  // namespace hybrid_ep::bindings
