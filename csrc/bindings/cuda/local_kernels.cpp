// Kernels that need no other rank.
#include <memory>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/current_stream.h"
#include "bindings/cuda/new_tensor.h"
#include "common/capture.h"
#include "common/device_guard.h"
#include "kernels/launch.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

// The results of get_dispatch_layout, of any number of tokens.
class LayoutCounts {
 public:
  LayoutCounts(int num_topk, int num_experts, int num_ranks, int num_ranks_per_domain, const py::object& device,
               int device_index, py::object current_stream, bool by_python)
      : params_{nullptr, nullptr, nullptr, 0, num_topk, num_experts, num_ranks, num_ranks_per_domain},
        num_totals_(num_ranks + num_ranks / num_ranks_per_domain + num_experts),
        stride_((num_totals_ + kAlign - 1) / kAlign * kAlign),
        tensors_(device, by_python),
        device_(device_index),
        stream_(device_index, std::move(current_stream)) {}

  // Takes top-k indices. Returns tokens per rank, per domain and per expert, and whether a token goes to a rank.
  py::object call(const py::object& given) {
    const uintptr_t topk_idx = address_of(given);
    const auto num_tokens = static_cast<int64_t>(py::len(given));
    cudaStream_t const stream = stream_.get();
    uintptr_t in_rank_at = 0, totals_at = 0;
    const py::object in_rank =
        tensors_.new_tensor({num_tokens, num_of_ranks()}, {num_of_ranks(), 1}, Dtype::kBool, &in_rank_at);
    const DeviceGuard guard(device_);
    const auto launch = [&](uintptr_t totals, bool are_zero) {
      LayoutParams params = params_;
      params.topk_idx = pointer<int64_t>(topk_idx);
      params.num_tokens = static_cast<int>(num_tokens);
      params.totals = pointer<int32_t>(totals);
      params.is_token_in_rank = pointer<bool>(in_rank_at);
      launch_layout(params, are_zero, stream);
    };
    if (take_zeros(stream)) {
      const int64_t begin = num_taken_++ * stride_;
      launch(chunk_->address() + begin * sizeof(int32_t), true);
      return parts_of(*chunk_, begin, in_rank);
    }
    if (const auto totals = tensors_.new_owned(num_totals_, Dtype::kInt32)) {
      launch(totals->address(), false);
      return parts_of(*totals, 0, in_rank);
    }
    const py::object totals = tensors_.new_tensor({num_totals_}, {1}, Dtype::kInt32, &totals_at);
    launch(totals_at, false);
    const py::sequence parts = totals.attr("split")(py::make_tuple(num_of_ranks(), num_of_domains(), num_of_experts()));
    return py::make_tuple(parts[0], parts[1], parts[2], in_rank);
  }

 private:
  static constexpr int64_t kAlign = 32;  // of totals, in int32: a cache line
  static constexpr int64_t kTotalsOfChunk = 64;

  int64_t num_of_ranks() const { return params_.num_ranks; }
  int64_t num_of_domains() const { return params_.num_ranks / params_.num_ranks_per_domain; }
  int64_t num_of_experts() const { return params_.num_experts; }

  // Makes sure that the chunk has totals left, which are zero. Returns false where the call must clear its totals: in a
  // capture, because every replay uses the same ones, and where torch cannot make the chunk.
  bool take_zeros(cudaStream_t stream) {
    if (capture_of(stream).id != 0) return false;
    if (chunk_ != nullptr && chunk_stream_ == stream && num_taken_ < kTotalsOfChunk) return true;
    chunk_ = tensors_.new_owned(kTotalsOfChunk * stride_, Dtype::kInt32);
    if (chunk_ == nullptr) return false;
    check_cuda(cudaMemsetAsync(pointer<void>(chunk_->address()), 0, kTotalsOfChunk * stride_ * sizeof(int32_t), stream),
               "cudaMemsetAsync");
    chunk_stream_ = stream;
    num_taken_ = 0;
    return true;
  }

  py::tuple parts_of(const OwnedTensor& totals, int64_t begin, const py::object& in_rank) const {
    const int64_t domains_at = begin + num_of_ranks(), experts_at = domains_at + num_of_domains();
    return py::make_tuple(totals.part(begin, num_of_ranks()), totals.part(domains_at, num_of_domains()),
                          totals.part(experts_at, num_of_experts()), in_rank);
  }

  LayoutParams params_;
  int64_t num_totals_, stride_;
  TensorDevice tensors_;
  int device_;
  CurrentStream stream_;
  // Totals of the next layouts. Without them, each would need a launch that clears its own.
  std::unique_ptr<OwnedTensor> chunk_;
  cudaStream_t chunk_stream_ = nullptr;
  int64_t num_taken_ = 0;
};

}  // namespace

void add_local_kernels(py::module_& module) {
  py::class_<LayoutCounts>(module, "LayoutCounts")
      .def(py::init<int, int, int, int, const py::object&, int, py::object, bool>(), py::kw_only(), py::arg("num_topk"),
           py::arg("num_experts"), py::arg("num_ranks"), py::arg("num_ranks_per_domain"), py::arg("device"),
           py::arg("device_index"), py::arg("current_stream"), py::arg("by_python") = false)
      .def("__call__", &LayoutCounts::call, py::arg("topk_idx"));
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
