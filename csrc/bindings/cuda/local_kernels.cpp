// Kernels that need no other rank.
#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "common/device_guard.h"
#include "kernels/launch.h"

namespace hybrid_ep::bindings {
namespace {

// The counts of get_dispatch_layout, of one shape.
class LayoutCounts {
 public:
  LayoutCounts(int num_tokens, int num_topk, int num_experts, int num_ranks, int num_ranks_per_domain, int device)
      : params_{nullptr, nullptr, nullptr, num_tokens, num_topk, num_experts, num_ranks, num_ranks_per_domain},
        device_(device) {}

  void call(Address topk_idx, Address totals, Address is_token_in_rank, uintptr_t stream) const {
    LayoutParams params = params_;
    params.topk_idx = pointer<int64_t>(topk_idx);
    params.totals = pointer<int32_t>(totals);
    params.is_token_in_rank = pointer<bool>(is_token_in_rank);
    const DeviceGuard guard(device_);
    launch_layout(params, stream_of(stream));
  }

 private:
  LayoutParams params_;
  int device_;
};

}  // namespace

void add_local_kernels(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<LayoutCounts>(module, "LayoutCounts")
      .def(py::init<int, int, int, int, int, int>(), py::kw_only(), py::arg("num_tokens"), py::arg("num_topk"),
           py::arg("num_experts"), py::arg("num_ranks"), py::arg("num_ranks_per_domain"), py::arg("device"))
      .def("__call__", &LayoutCounts::call, py::arg("topk_idx"), py::arg("totals"), py::arg("is_token_in_rank"),
           py::arg("stream"));
  module.def(
      "weights_to_probs",
      [](uintptr_t topk_idx, uintptr_t weights, uintptr_t probs, int num_tokens, int num_topk, int num_experts,
         bool adds_columns, int device, uintptr_t stream) {
        const DeviceGuard guard(device);
        launch_weights_to_probs({pointer<int64_t>(topk_idx), pointer<float>(weights), pointer<float>(probs), num_tokens,
                                 num_topk, num_experts, adds_columns},
                                stream_of(stream));
      },
      py::kw_only(), py::arg("topk_idx"), py::arg("weights"), py::arg("probs"), py::arg("num_tokens"),
      py::arg("num_topk"), py::arg("num_experts"), py::arg("adds_columns"), py::arg("device"), py::arg("stream"));
  module.def(
      "probs_to_weights",
      [](uintptr_t topk_idx, uintptr_t weights, uintptr_t probs, int num_tokens, int num_topk, int num_experts,
         int device, uintptr_t stream) {
        const DeviceGuard guard(device);
        launch_probs_to_weights({pointer<int64_t>(topk_idx), pointer<float>(weights), pointer<float>(probs), num_tokens,
                                 num_topk, num_experts, false},
                                stream_of(stream));
      },
      py::kw_only(), py::arg("topk_idx"), py::arg("weights"), py::arg("probs"), py::arg("num_tokens"),
      py::arg("num_topk"), py::arg("num_experts"), py::arg("device"), py::arg("stream"));
  module.def(
      "can_run",
      [](int device) {
        const DeviceGuard guard(device);
        return can_run_kernels();
      },
      py::arg("device"));
}

}  // namespace hybrid_ep::bindings
