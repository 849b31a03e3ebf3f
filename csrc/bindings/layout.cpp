#include "bindings/bindings.h"
#include "common/check.h"
#include "layout/host_layout.h"

namespace hybrid_ep::bindings {

// Pointers come as integers (tensor.data_ptr()); the caller keeps the tensors alive and checks dtypes and shapes.
void add_layout(pybind11::module_& module) {
  module.def(
      "compute_layout",
      [](uintptr_t topk_idx, int64_t num_tokens, int64_t num_topk, int num_experts, int num_ranks,
         uintptr_t num_tokens_per_rank, uintptr_t num_tokens_per_expert, uintptr_t is_token_in_rank) {
        require(num_ranks > 0, "num_ranks", num_ranks, "≥ 1");
        require(num_experts > 0 && num_experts % num_ranks == 0, "num_experts", num_experts, "a multiple of num_ranks");
        return compute_layout({reinterpret_cast<const int64_t*>(topk_idx),
                               num_tokens,
                               num_topk,
                               {num_experts, num_ranks},
                               reinterpret_cast<int32_t*>(num_tokens_per_rank),
                               reinterpret_cast<int32_t*>(num_tokens_per_expert),
                               reinterpret_cast<bool*>(is_token_in_rank)});
      },
      pybind11::kw_only(), pybind11::arg("topk_idx"), pybind11::arg("num_tokens"), pybind11::arg("num_topk"),
      pybind11::arg("num_experts"), pybind11::arg("num_ranks"), pybind11::arg("num_tokens_per_rank"),
      pybind11::arg("num_tokens_per_expert"), pybind11::arg("is_token_in_rank"),
      pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace hybrid_ep::bindings
