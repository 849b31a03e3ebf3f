// Kernels that need no other rank.
#include "bindings/cuda/bindings.h"
#include "kernels/launch.h"

namespace hybrid_ep::bindings {

void add_local_kernels(pybind11::module_& module) {
  namespace py = pybind11;
  module.def(
      "duplicate",
      [](uintptr_t rows, uintptr_t places, uintptr_t weights, uintptr_t scales, uintptr_t probs,
         uintptr_t permuted_scales, uintptr_t route, int64_t counts_at, int rank, int num_ranks, int num_topk,
         int num_local_experts, int row_bytes, int num_scales, int row_limit, int recv_limit, uintptr_t stream) {
        DuplicateParams params{};
        params.rows = pointer<uint8_t>(rows);
        params.places = pointer<int32_t>(places);
        params.weights = pointer<float>(weights);
        params.scales = pointer<uint32_t>(scales);
        params.probs = pointer<float>(probs);
        params.permuted_scales = pointer<uint32_t>(permuted_scales);
        params.rank_prefix = pointer<int32_t>(route);
        params.num_tokens_per_expert = pointer<int32_t>(route) + counts_at;
        params.num_rows_per_expert = params.num_tokens_per_expert + num_local_experts;
        params.rank = rank;
        params.num_ranks = num_ranks;
        params.num_topk = num_topk;
        params.num_local_experts = num_local_experts;
        params.row_bytes = row_bytes;
        params.num_scales = num_scales;
        params.row_limit = row_limit;
        params.recv_limit = recv_limit;
        launch_duplicate(params, stream_of(stream));
      },
      py::kw_only(), py::arg("rows"), py::arg("places"), py::arg("weights"), py::arg("scales"), py::arg("probs"),
      py::arg("permuted_scales"), py::arg("route"), py::arg("counts_at"), py::arg("rank"), py::arg("num_ranks"),
      py::arg("num_topk"), py::arg("num_local_experts"), py::arg("row_bytes"), py::arg("num_scales"),
      py::arg("row_limit"), py::arg("recv_limit"), py::arg("stream"));
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
