// Kernels that need no other rank.
#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/new_tensor.h"
#include "common/device_guard.h"
#include "kernels/launch.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

// The results of get_dispatch_layout, of one shape.
class LayoutCounts {
 public:
  LayoutCounts(int num_tokens, int num_topk, int num_experts, int num_ranks, int num_ranks_per_domain,
               const NewTensor& make_totals, const NewTensor& make_in_rank, int device)
      : params_{nullptr, nullptr, nullptr, num_tokens, num_topk, num_experts, num_ranks, num_ranks_per_domain},
        make_totals_(make_totals),
        make_in_rank_(make_in_rank),
        device_(device) {}

  // Tokens per rank, per domain and per expert, and whether a token goes to a rank.
  py::tuple call(Address topk_idx, uintptr_t stream) const {
    LayoutParams params = params_;
    uintptr_t in_rank_at = 0, totals_at = 0;
    const py::object in_rank = make_in_rank_.make(&in_rank_at);
    const int num_ranks = params.num_ranks, num_domains = num_ranks / params.num_ranks_per_domain;
    const auto launch = [&](uintptr_t totals) {
      params.topk_idx = pointer<int64_t>(topk_idx);
      params.totals = pointer<int32_t>(totals);
      params.is_token_in_rank = pointer<bool>(in_rank_at);
      const DeviceGuard guard(device_);
      launch_layout(params, stream_of(stream));
    };
    if (const auto totals = make_totals_.make_owned()) {
      launch(totals->address());
      return py::make_tuple(totals->part(0, num_ranks), totals->part(num_ranks, num_domains),
                            totals->part(num_ranks + num_domains, params.num_experts), in_rank);
    }
    const py::object totals = make_totals_.make(&totals_at);
    launch(totals_at);
    const py::sequence parts = totals.attr("split")(py::make_tuple(num_ranks, num_domains, params.num_experts));
    return py::make_tuple(parts[0], parts[1], parts[2], in_rank);
  }

 private:
  LayoutParams params_;
  NewTensor make_totals_, make_in_rank_;
  int device_;
};

}  // namespace

void add_local_kernels(py::module_& module) {
  py::class_<LayoutCounts>(module, "LayoutCounts")
      .def(py::init<int, int, int, int, int, const NewTensor&, const NewTensor&, int>(), py::kw_only(),
           py::arg("num_tokens"), py::arg("num_topk"), py::arg("num_experts"), py::arg("num_ranks"),
           py::arg("num_ranks_per_domain"), py::arg("make_totals"), py::arg("make_in_rank"), py::arg("device"))
      .def("__call__", &LayoutCounts::call, py::arg("topk_idx"), py::arg("stream"));
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
