// Kernels that need no other rank.
#include "bindings/cuda/bindings.h"
#include "kernels/launch.h"

namespace hybrid_ep::bindings {

void add_local_kernels(pybind11::module_& module) {
  namespace py = pybind11;
  module.def(
      "reduce_local",
      [](uintptr_t rows, uintptr_t probs, uintptr_t places, uintptr_t route, uintptr_t out, uintptr_t out_weights,
         int rank, int num_ranks, int num_topk, int row_bytes, int row_limit, int recv_limit, uintptr_t stream) {
        launch_reduce_local({pointer<uint8_t>(rows), pointer<float>(probs), pointer<int32_t>(places),
                             pointer<int32_t>(route), pointer<uint8_t>(out), pointer<float>(out_weights), rank,
                             num_ranks, num_topk, row_bytes, row_limit, recv_limit},
                            stream_of(stream));
      },
      py::kw_only(), py::arg("rows"), py::arg("probs"), py::arg("places"), py::arg("route"), py::arg("out"),
      py::arg("out_weights"), py::arg("rank"), py::arg("num_ranks"), py::arg("num_topk"), py::arg("row_bytes"),
      py::arg("row_limit"), py::arg("recv_limit"), py::arg("stream"));
  module.def(
      "layout",
      [](uintptr_t topk_idx, uintptr_t totals, uintptr_t is_token_in_rank, int num_tokens, int num_topk,
         int num_experts, int num_ranks, int num_ranks_per_domain, uintptr_t stream) {
        launch_layout({pointer<int64_t>(topk_idx), pointer<int32_t>(totals), pointer<bool>(is_token_in_rank),
                       num_tokens, num_topk, num_experts, num_ranks, num_ranks_per_domain},
                      stream_of(stream));
      },
      py::kw_only(), py::arg("topk_idx"), py::arg("totals"), py::arg("is_token_in_rank"), py::arg("num_tokens"),
      py::arg("num_topk"), py::arg("num_experts"), py::arg("num_ranks"), py::arg("num_ranks_per_domain"),
      py::arg("stream"));
}

}  // namespace hybrid_ep::bindings
