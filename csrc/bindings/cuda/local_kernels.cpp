// Kernels that need no other rank.
#include "bindings/cuda/bindings.h"
#include "common/device_guard.h"
#include "kernels/launch.h"

namespace hybrid_ep::bindings {

void add_local_kernels(pybind11::module_& module) {
  namespace py = pybind11;
  module.def(
      "layout",
      [](uintptr_t topk_idx, uintptr_t totals, uintptr_t is_token_in_rank, int num_tokens, int num_topk,
         int num_experts, int num_ranks, int num_ranks_per_domain, int device, uintptr_t stream) {
        const DeviceGuard guard(device);
        launch_layout({pointer<int64_t>(topk_idx), pointer<int32_t>(totals), pointer<bool>(is_token_in_rank),
                       num_tokens, num_topk, num_experts, num_ranks, num_ranks_per_domain},
                      stream_of(stream));
      },
      py::kw_only(), py::arg("topk_idx"), py::arg("totals"), py::arg("is_token_in_rank"), py::arg("num_tokens"),
      py::arg("num_topk"), py::arg("num_experts"), py::arg("num_ranks"), py::arg("num_ranks_per_domain"),
      py::arg("device"), py::arg("stream"));
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
