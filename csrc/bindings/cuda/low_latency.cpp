// The memory of low-latency calls and their plans. calls/low_latency.cpp has the calls.
#include "bindings/cuda/low_latency.h"

#include <algorithm>
#include <map>
#include <string>

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

// What tests launch that have no torch: calls of addresses.
void add_launches(py::module_& module) {
  py::enum_<Halves>(module, "Halves").value("SEND", Halves::kSend).value("RECEIVE", Halves::kReceive);
  py::class_<LowLatencyDispatch>(module, "LowLatencyDispatch")
      .def(py::init([](int buffer_idx, uintptr_t rows, uintptr_t topk_idx, int num_tokens, uintptr_t received_rows,
                       uintptr_t received_scales, uintptr_t results) {
             LowLatencyDispatch call{};
             call.buffer_idx = buffer_idx;
             call.rows = pointer<uint8_t>(rows);
             call.topk_idx = pointer<int64_t>(topk_idx);
             call.num_tokens = num_tokens;
             call.received_rows = pointer<uint8_t>(received_rows);
             call.received_scales = pointer<uint32_t>(received_scales);
             call.results = pointer<int32_t>(results);
             return call;
           }),
           py::kw_only(), py::arg("buffer_idx"), py::arg("rows"), py::arg("topk_idx"), py::arg("num_tokens"),
           py::arg("received_rows"), py::arg("received_scales"), py::arg("results"));
  py::class_<LowLatencyCombine>(module, "LowLatencyCombine")
      .def(py::init([](int buffer_idx, uintptr_t results, uintptr_t topk_idx, uintptr_t topk_weights, int num_tokens,
                       uintptr_t rows, uintptr_t out) {
             LowLatencyCombine call{};
             call.buffer_idx = buffer_idx;
             call.results = pointer<int32_t>(results);
             call.topk_idx = pointer<int64_t>(topk_idx);
             call.topk_weights = pointer<float>(topk_weights);
             call.num_tokens = num_tokens;
             call.rows = pointer<uint8_t>(rows);
             call.min_tokens_to_sum = kNoSums;
             call.out = pointer<uint8_t>(out);
             return call;
           }),
           py::kw_only(), py::arg("buffer_idx"), py::arg("results"), py::arg("topk_idx"), py::arg("topk_weights"),
           py::arg("num_tokens"), py::arg("rows"), py::arg("out"));
}

}  // namespace

py::object make_counts(const LowLatencyPlan& plan, const py::object& memory, uintptr_t address, int device) {
  const int64_t num_local = plan.shape.num_experts / plan.num_ranks;
  return result(memory, address, device, plan.results.counts, {num_local}, 32);
}

py::tuple make_tables(const LowLatencyPlan& plan, const py::object& memory, uintptr_t address, int device) {
  const int64_t num_local = plan.shape.num_experts / plan.num_ranks;
  const int64_t num_sources = static_cast<int64_t>(plan.num_ranks) * plan.shape.max_tokens;
  return py::make_tuple(result(memory, address, device, plan.results.src_info, {num_local, num_sources}, 32),
                        result(memory, address, device, plan.results.layout_range, {num_local, plan.num_ranks}, 64));
}

void add_low_latency(py::module_& module) {
  module.attr("low_latency_buffers") = kLowLatencyBuffers;
  module.attr("low_latency_no_sums") = kNoSums;
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
      .def("peer_chunk_bytes", &peer_chunk_bytes, py::arg("group_size"));
  py::class_<LowLatencyRegion>(module, "LowLatencyRegion")
      .def(py::init<const Communicator&, const std::vector<uintptr_t>&, const LowLatencyCapacity&, bool>(),
           py::kw_only(), py::arg("communicator"), py::arg("memory"), py::arg("capacity"), py::arg("takes_masks"),
           py::keep_alive<1, 2>())
      .def("covers", &LowLatencyRegion::covers, py::arg("plan"))
      .def_property_readonly("was_captured", &LowLatencyRegion::was_captured)
      .def(
          "dispatch",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, const LowLatencyDispatch& call, Halves halves,
             uintptr_t stream) { self.dispatch(plan, call, halves, stream_of(stream)); },
          py::arg("plan"), py::arg("call"), py::arg("halves"), py::arg("stream"))
      .def(
          "combine",
          [](LowLatencyRegion& self, const LowLatencyPlan& plan, const LowLatencyCombine& call, Halves halves,
             uintptr_t stream) { self.combine(plan, call, halves, stream_of(stream)); },
          py::arg("plan"), py::arg("call"), py::arg("halves"), py::arg("stream"));
  add_launches(module);
  add_between_domains(module);
}

}  // namespace hybrid_ep::bindings
