// The low-latency calls: each half is one method, one launch.
#include "runtime/low_latency.h"

#include <algorithm>

#include "bindings/cuda/bindings.h"

namespace hybrid_ep::bindings {

void add_low_latency(pybind11::module_& module) {
  namespace py = pybind11;
  module.attr("low_latency_buffers") = kLowLatencyBuffers;
  module.attr("low_latency_control_bytes") = sizeof(LowLatencyControl);
  module.attr("low_latency_masks_offset") = offsetof(LowLatencyControl, masked);
  py::enum_<ScaleFormat>(module, "ScaleFormat")
      .value("NONE", ScaleFormat::kNone)
      .value("FLOAT", ScaleFormat::kFloat)
      .value("POWER_OF_TWO", ScaleFormat::kPowerOfTwo)
      .value("UE8M0", ScaleFormat::kUe8m0);
  py::class_<LowLatencyCapacity>(module, "LowLatencyCapacity")
      .def("covers", &LowLatencyCapacity::covers, py::arg("other"))
      .def(
          "united_with",
          [](const LowLatencyCapacity& self, const LowLatencyCapacity& other) {
            return LowLatencyCapacity{std::max(self.dispatch_bytes, other.dispatch_bytes),
                                      std::max(self.combine_bytes, other.combine_bytes)};
          },
          py::arg("other"))
      .def_property_readonly("region_bytes", &LowLatencyCapacity::region_bytes);
  py::class_<LowLatencyShape>(module, "LowLatencyShape")
      .def(py::init([](int num_experts, int num_topk, int hidden, int max_tokens) {
             return LowLatencyShape{num_experts, num_topk, hidden, max_tokens};
           }),
           py::kw_only(), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("max_tokens"))
      .def_readonly("num_topk", &LowLatencyShape::num_topk)
      .def("capacity", &LowLatencyCapacity::of, py::arg("num_ranks"));
  py::class_<LowLatencyRegion>(module, "LowLatencyRegion")
      .def(py::init<const Communicator&, const std::vector<uintptr_t>&, const LowLatencyCapacity&>(), py::kw_only(),
           py::arg("communicator"), py::arg("memory"), py::arg("capacity"), py::keep_alive<1, 2>())
      .def(
          "send_tokens",
          [](const LowLatencyRegion& self, const LowLatencyShape& shape, ScaleFormat format, int buffer_idx,
             uintptr_t rows, uintptr_t topk_idx, uintptr_t row_of, int num_tokens, uintptr_t stream) {
            SendTokensParams params{};
            params.shape = shape;
            params.format = format;
            params.rows = pointer<uint8_t>(rows);
            params.topk_idx = pointer<int64_t>(topk_idx);
            params.row_of = pointer<int32_t>(row_of);
            params.num_tokens = num_tokens;
            self.send_tokens(params, buffer_idx, stream_of(stream));
          },
          py::kw_only(), py::arg("shape"), py::arg("format"), py::arg("buffer_idx"), py::arg("rows"),
          py::arg("topk_idx"), py::arg("row_of"), py::arg("num_tokens"), py::arg("stream"))
      .def(
          "receive_tokens",
          [](const LowLatencyRegion& self, const LowLatencyShape& shape, ScaleFormat format, int buffer_idx,
             uintptr_t rows, uintptr_t scales, uintptr_t count, uintptr_t src_info, uintptr_t layout_range,
             uintptr_t row_of, uintptr_t num_received, uintptr_t wait_stats, uintptr_t stream) {
            ReceiveTokensParams params{};
            params.shape = shape;
            params.rows = pointer<uint8_t>(rows);
            params.scales = pointer<uint32_t>(scales);
            params.count = pointer<int32_t>(count);
            params.src_info = pointer<int32_t>(src_info);
            params.layout_range = pointer<int64_t>(layout_range);
            params.row_of = pointer<int32_t>(row_of);
            params.num_received = pointer<int32_t>(num_received);
            params.wait_stats = pointer<int64_t>(wait_stats);
            self.receive_tokens(params, buffer_idx, format, stream_of(stream));
          },
          py::kw_only(), py::arg("shape"), py::arg("format"), py::arg("buffer_idx"), py::arg("rows"), py::arg("scales"),
          py::arg("count"), py::arg("src_info"), py::arg("layout_range"), py::arg("row_of"), py::arg("num_received"),
          py::arg("wait_stats"), py::arg("stream"))
      .def(
          "return_rows",
          [](const LowLatencyRegion& self, const LowLatencyShape& shape, int buffer_idx, uintptr_t rows,
             uintptr_t row_of, uintptr_t num_received, uintptr_t topk_weights, int num_tokens, int min_tokens_to_sum,
             uintptr_t wait_stats, uintptr_t stream) {
            ReturnRowsParams params{};
            params.shape = shape;
            params.rows = pointer<uint8_t>(rows);
            params.row_of = pointer<int32_t>(row_of);
            params.num_received = pointer<int32_t>(num_received);
            params.topk_weights = pointer<float>(topk_weights);
            params.num_tokens = num_tokens;
            params.min_tokens_to_sum = min_tokens_to_sum;
            params.wait_stats = pointer<int64_t>(wait_stats);
            self.return_rows(params, buffer_idx, stream_of(stream));
          },
          py::kw_only(), py::arg("shape"), py::arg("buffer_idx"), py::arg("rows"), py::arg("row_of"),
          py::arg("num_received"), py::arg("topk_weights"), py::arg("num_tokens"), py::arg("min_tokens_to_sum"),
          py::arg("wait_stats"), py::arg("stream"))
      .def(
          "sum_rows",
          [](const LowLatencyRegion& self, const LowLatencyShape& shape, int buffer_idx, uintptr_t topk_idx,
             uintptr_t topk_weights, uintptr_t out, int num_tokens, uintptr_t wait_stats, uintptr_t stream) {
            SumRowsParams params{};
            params.shape = shape;
            params.topk_idx = pointer<int64_t>(topk_idx);
            params.topk_weights = pointer<float>(topk_weights);
            params.out = pointer<uint8_t>(out);
            params.num_tokens = num_tokens;
            params.wait_stats = pointer<int64_t>(wait_stats);
            self.sum_rows(params, buffer_idx, stream_of(stream));
          },
          py::kw_only(), py::arg("shape"), py::arg("buffer_idx"), py::arg("topk_idx"), py::arg("topk_weights"),
          py::arg("out"), py::arg("num_tokens"), py::arg("wait_stats"), py::arg("stream"));
}

}  // namespace hybrid_ep::bindings
