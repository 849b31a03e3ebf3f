// The low-latency calls: each half is one method, and each call as a whole.
#include "bindings/cuda/low_latency.h"

#include <algorithm>
#include <map>
#include <string>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/tensors.h"
#include "runtime/low_latency_between.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

// A tensor over a part of a dispatch's results, which are at `address`: it begins after so many int32. It keeps
// `memory`.
py::object result(const py::object& memory, uintptr_t address, int device, int64_t begin, std::vector<int64_t> sizes,
                  uint8_t bits) {
  return make_tensor(address + begin * sizeof(int32_t), std::move(sizes), {kInt, bits}, device, [memory] {});
}

// src_info and layout_range.
py::tuple make_tables(const LowLatencyPlan& plan, const py::object& memory, uintptr_t address, int device) {
  const int64_t num_local = plan.shape.num_experts / plan.num_ranks;
  const int64_t num_sources = static_cast<int64_t>(plan.num_ranks) * plan.shape.max_tokens;
  return py::make_tuple(result(memory, address, device, plan.results.src_info, {num_local, num_sources}, 32),
                        result(memory, address, device, plan.results.layout_range, {num_local, plan.num_ranks}, 64));
}

// Bytes of the chunks of a plan's calls to a peer: of dispatch and of combine.
py::tuple peer_chunk_bytes(const LowLatencyPlan& plan, int group_size) {
  const PeerChunkBytes bytes = PeerChunkBytes::of(plan.shape, group_size);
  return py::make_tuple(bytes.tokens, bytes.rows);
}

void add_between_domains(py::module_& module) {
  module.attr("low_latency_between_bytes") = sizeof(LowLatencyBetweenControl);
  // Offset of the session; the first epoch of the session follows it.
  module.attr("low_latency_session_offset") = offsetof(LowLatencyBetweenControl, session);
  module.attr("low_latency_max_chunk_bytes") = kMaxPeerChunkBytes;
  py::class_<LowLatencyBetweenRegion, LowLatencyRegion>(module, "LowLatencyBetweenRegion")
      .def(py::init([](const Communicator& communicator, int rank, int num_domains, int group_size,
                       const std::vector<uintptr_t>& memory, const LowLatencyCapacity& capacity, bool takes_masks,
                       Proxy& proxy, const py::object& kernels) {
             const Grid grid{rank, num_domains, communicator.domain().num_ranks};
             return std::make_unique<LowLatencyBetweenRegion>(communicator, grid, group_size, memory, capacity,
                                                              takes_masks, proxy, link_kernels_of(kernels));
           }),
           py::kw_only(), py::arg("communicator"), py::arg("rank"), py::arg("num_domains"), py::arg("group_size"),
           py::arg("memory"), py::arg("capacity"), py::arg("takes_masks"), py::arg("proxy"),
           py::arg("kernels") = py::none(), py::keep_alive<1, 2>(), py::keep_alive<1, 9>());
}

}  // namespace

py::object make_counts(const LowLatencyPlan& plan, const py::object& memory, uintptr_t address, int device) {
  const int64_t num_local = plan.shape.num_experts / plan.num_ranks;
  return result(memory, address, device, plan.results.counts, {num_local}, 32);
}

void add_low_latency(py::module_& module) {
  module.attr("low_latency_buffers") = kLowLatencyBuffers;
  module.attr("low_latency_no_sums") = kNoSums;
  module.attr("low_latency_max_tokens") = kMaxLowLatencyTokens;
  module.attr("low_latency_masks_offset") = offsetof(LowLatencyControl, masked);
  // The words of a channel, for tests that act as another rank: one after the other those of dispatch, one for
  // each buffer, and those of combine.
  module.attr("low_latency_channel_bytes") = sizeof(LowLatencyChannel);
  py::dict offsets;
  offsets["begun"] = offsetof(LowLatencyChannel, begun) + offsetof(LowLatencyBegun, epoch);
  offsets["sent"] = offsetof(LowLatencyChannel, sent) + offsetof(LowLatencySent, epoch);
  offsets["weights_epoch"] = offsetof(LowLatencyChannel, weights_epoch);
  offsets["free_epoch"] = offsetof(LowLatencyChannel, free_epoch);
  offsets["send"] = offsetof(LowLatencyChannel, send);
  offsets["receive"] = offsetof(LowLatencyChannel, receive);
  module.attr("low_latency_channel_offsets") = offsets;
  module.def(
      "low_latency_call_fields",
      [](int64_t words) {
        const LowLatencyCall call{{static_cast<uint32_t>(words), static_cast<uint32_t>(words >> 32)}};
        return std::map<std::string, uint32_t>{
            {"num_experts", call.num_experts()}, {"num_topk", call.num_topk()},         {"hidden", call.hidden()},
            {"max_tokens", call.max_tokens()},   {"scale_format", call.scale_format()}, {"refusal", call.refusal()}};
      },
      py::arg("words"));
  py::enum_<ScaleFormat>(module, "ScaleFormat")
      .value("NONE", ScaleFormat::kNone)
      .value("FLOAT", ScaleFormat::kFloat)
      .value("POWER_OF_TWO", ScaleFormat::kPowerOfTwo)
      .value("UE8M0", ScaleFormat::kUe8m0)
      .value("NVFP4", ScaleFormat::kNvfp4)
      .value("NVFP4_UE8M0", ScaleFormat::kNvfp4Ue8m0);
  py::class_<LowLatencyCapacity>(module, "LowLatencyCapacity")
      .def(
          "united_with",
          [](const LowLatencyCapacity& self, const LowLatencyCapacity& other) {
            return LowLatencyCapacity{
                std::max(self.routes_bytes, other.routes_bytes), std::max(self.flags_bytes, other.flags_bytes),
                std::max(self.slots_bytes, other.slots_bytes), std::max(self.combine_bytes, other.combine_bytes)};
          },
          py::arg("other"))
      .def_property_readonly("epochs_bytes", &LowLatencyCapacity::epochs_bytes)
      .def_property_readonly("region_bytes", &LowLatencyCapacity::region_bytes);
  py::class_<LowLatencyPlan>(module, "LowLatencyPlan")
      .def(py::init([](int num_ranks, int num_experts, int num_topk, int hidden, int max_tokens, ScaleFormat format) {
             return LowLatencyPlan::of({num_experts, num_topk, hidden, max_tokens}, format, num_ranks);
           }),
           py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"),
           py::arg("max_tokens"), py::arg("format"))
      .def_readonly("capacity", &LowLatencyPlan::capacity)
      .def_property_readonly("num_ints", [](const LowLatencyPlan& plan) { return plan.results.num_ints; })
      .def_property_readonly("num_ints_between",
                             [](const LowLatencyPlan& plan) { return OwnTables::of(plan).num_ints; })
      .def_static("refused", &LowLatencyPlan::refused, py::kw_only(), py::arg("num_ranks"), py::arg("number"))
      // A combine that this rank refuses: the index of an int32 in the results, and the value to write there, so that
      // the send publishes the refusal. The send adds kTooManyRowsBit to it, which makes kRefusedBits.
      .def_property_readonly("refusal_of_combine",
                             [](const LowLatencyPlan& plan) {
                               const uint32_t value = kNoSignalBit | plan.call.refusal();
                               return py::make_tuple(plan.results.num_too_many, static_cast<int32_t>(value));
                             })
      .def("compared", &LowLatencyPlan::compared)
      .def("peer_chunk_bytes", &peer_chunk_bytes, py::arg("group_size"))
      .def("counts", &make_counts, py::arg("memory"), py::arg("address"), py::arg("device"))
      .def("tables", &make_tables, py::arg("memory"), py::arg("address"), py::arg("device"));
  py::class_<LowLatencyRegion>(module, "LowLatencyRegion")
      .def(py::init<const Communicator&, const std::vector<uintptr_t>&, const LowLatencyCapacity&, bool>(),
           py::kw_only(), py::arg("communicator"), py::arg("memory"), py::arg("capacity"), py::arg("takes_masks"),
           py::keep_alive<1, 2>())
      .def("covers", &LowLatencyRegion::covers, py::arg("plan"))
      .def_property_readonly("was_captured", &LowLatencyRegion::was_captured)
      .def(
          "is_capturing",
          [](const LowLatencyRegion& self, uintptr_t stream) { return self.is_capturing(stream_of(stream)); },
          py::arg("stream"))
      .def(
          "send_tokens",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, int buffer_idx, Address rows, Address topk_idx,
             int num_tokens, Address global_scale, uint32_t counter, Address results, uintptr_t stream) {
            self.send_tokens(plan, buffer_idx, tokens_out(rows, topk_idx, num_tokens, global_scale, counter),
                             pointer<int32_t>(results), stream_of(stream));
          },
          py::arg("plan"), py::arg("buffer_idx"), py::arg("rows"), py::arg("topk_idx"), py::arg("num_tokens"),
          py::arg("global_scale"), py::arg("counter"), py::arg("results"), py::arg("stream"))
      .def(
          "receive_tokens",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, int buffer_idx, Address rows, Address scales,
             Address wait_stats, Address results, uintptr_t stream) {
            self.receive_tokens(plan, buffer_idx, tokens_in(rows, scales, wait_stats), pointer<int32_t>(results),
                                stream_of(stream));
          },
          py::arg("plan"), py::arg("buffer_idx"), py::arg("rows"), py::arg("scales"), py::arg("wait_stats"),
          py::arg("results"), py::arg("stream"))
      .def(
          "dispatch_tokens",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, int buffer_idx, Address rows, Address topk_idx,
             int num_tokens, Address global_scale, uint32_t counter, Address received_rows, Address received_scales,
             Address wait_stats, Address results, uintptr_t stream) {
            self.dispatch_tokens(plan, buffer_idx, tokens_out(rows, topk_idx, num_tokens, global_scale, counter),
                                 tokens_in(received_rows, received_scales, wait_stats), pointer<int32_t>(results),
                                 stream_of(stream));
          },
          py::arg("plan"), py::arg("buffer_idx"), py::arg("rows"), py::arg("topk_idx"), py::arg("num_tokens"),
          py::arg("global_scale"), py::arg("counter"), py::arg("received_rows"), py::arg("received_scales"),
          py::arg("wait_stats"), py::arg("results"), py::arg("stream"))
      .def(
          "return_rows",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, int buffer_idx, Address rows, Address results,
             Address topk_weights, int num_tokens, bool use_logfmt, int min_tokens_to_sum, Address wait_stats,
             uintptr_t stream) {
            self.return_rows(plan, buffer_idx, rows_home(rows, results, topk_weights, num_tokens, use_logfmt),
                             min_tokens_to_sum, pointer<int64_t>(wait_stats), stream_of(stream));
          },
          py::arg("plan"), py::arg("buffer_idx"), py::arg("rows"), py::arg("results"), py::arg("topk_weights"),
          py::arg("num_tokens"), py::arg("use_logfmt"), py::arg("min_tokens_to_sum"), py::arg("wait_stats"),
          py::arg("stream"))
      .def(
          "return_signalled_rows",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, int buffer_idx, Address rows, Address results,
             Address topk_weights, int num_tokens, bool use_logfmt, Address signals, uint32_t expected,
             int num_per_expert, int rows_per_signal, int num_sms, uintptr_t stream) {
            const ExpertSignals experts{pointer<uint32_t>(signals), expected, num_per_expert, rows_per_signal};
            self.return_signalled_rows(plan, buffer_idx, rows_home(rows, results, topk_weights, num_tokens, use_logfmt),
                                       experts, num_sms, stream_of(stream));
          },
          py::arg("plan"), py::arg("buffer_idx"), py::arg("rows"), py::arg("results"), py::arg("topk_weights"),
          py::arg("num_tokens"), py::arg("use_logfmt"), py::arg("signals"), py::arg("expected"),
          py::arg("num_per_expert"), py::arg("rows_per_signal"), py::arg("num_sms"), py::arg("stream"))
      .def(
          "sum_rows",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, int buffer_idx, Address results, Address topk_idx,
             Address topk_weights, Address out, int num_tokens, bool use_logfmt, Address wait_stats, uintptr_t stream) {
            self.sum_rows(plan, buffer_idx, rows_to_sum(results, topk_idx, topk_weights, out, num_tokens, use_logfmt),
                          pointer<int64_t>(wait_stats), stream_of(stream));
          },
          py::arg("plan"), py::arg("buffer_idx"), py::arg("results"), py::arg("topk_idx"), py::arg("topk_weights"),
          py::arg("out"), py::arg("num_tokens"), py::arg("use_logfmt"), py::arg("wait_stats"), py::arg("stream"))
      .def(
          "combine_rows",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, int buffer_idx, Address rows, Address results,
             Address topk_idx, Address topk_weights, Address out, int num_tokens, bool use_logfmt,
             int min_tokens_to_sum, Address wait_stats, uintptr_t stream) {
            self.combine_rows(plan, buffer_idx, rows_home(rows, results, topk_weights, num_tokens, use_logfmt),
                              min_tokens_to_sum,
                              rows_to_sum(results, topk_idx, topk_weights, out, num_tokens, use_logfmt),
                              pointer<int64_t>(wait_stats), stream_of(stream));
          },
          py::arg("plan"), py::arg("buffer_idx"), py::arg("rows"), py::arg("results"), py::arg("topk_idx"),
          py::arg("topk_weights"), py::arg("out"), py::arg("num_tokens"), py::arg("use_logfmt"),
          py::arg("min_tokens_to_sum"), py::arg("wait_stats"), py::arg("stream"));
  add_between_domains(module);
  add_low_latency_calls(module);
}

}  // namespace hybrid_ep::bindings
