#include "runtime/communicator.h"

#include <algorithm>
#include <utility>

#include "bindings/cuda/bindings.h"
#include "common/check.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

using TypePair = std::pair<int, int>;  // code and bits of DLPack

Columns columns(int num, TypePair type) {
  return {num, {static_cast<uint8_t>(type.first), static_cast<uint8_t>(type.second)}};
}

DispatchShape dispatch_shape(bool makes_route, int num_tokens, int num_topk, int num_experts, bool has_weights,
                             int hidden, TypePair row_type, int num_scales, TypePair scale_type, int range_first,
                             int range_step, int range_size, int pad_multiple, int row_limit, bool waits_for_counts,
                             int num_sms, int dtype, int scale_dtype, bool has_topk, int num_worst_tokens,
                             int common_bound, FaultKind refusal, int refused_value, int max_tokens) {
  require(num_tokens >= 0 && num_tokens <= kMaxTokens, "tokens of a rank", num_tokens, "0 … 65536");
  require(num_topk >= 1 && num_topk <= kMaxTopk, "top-k", num_topk, "1 … 32");
  require(num_experts >= 1 && num_experts <= kMaxExperts, "num_experts", num_experts, "1 … 2048");
  require(row_limit >= 0, "row_limit", row_limit, "≥ 0");
  DispatchShape shape{};
  shape.format.rows = columns(hidden, row_type);
  shape.format.experts = columns(makes_route ? num_topk : 0, {kInt, 64});
  shape.format.weights = columns(has_weights ? num_topk : 0, {kFloat, 32});
  shape.format.scales = columns(num_scales, scale_type);
  shape.makes_route = makes_route;
  shape.num_tokens = num_tokens;
  shape.num_topk = num_topk;
  shape.num_experts = num_experts;
  shape.range_first = range_first;
  shape.range_step = range_step;
  shape.range_size = range_size;
  shape.pad_multiple = pad_multiple;
  shape.row_limit = row_limit;
  shape.waits_for_counts = waits_for_counts;
  shape.num_sms = num_sms;
  shape.call = {dtype, scale_dtype, has_topk, num_worst_tokens, common_bound, refusal, refused_value, max_tokens};
  return shape;
}

DispatchPlan dispatch_plan(const DispatchShape& shape, int num_ranks) {
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "ranks of the domain", num_ranks, "1 … 72");
  require(shape.num_experts >= num_ranks, "num_experts", shape.num_experts, "ranks … 2048");
  const bool is_permuted = shape.pad_multiple > 0;
  DispatchPlan plan{shape, {}, num_ranks};
  if (is_permuted) plan.format.experts.type.bits = 32;  // rows of copies
  plan.route =
      make_route_layout(num_ranks, shape.num_tokens, shape.num_experts / num_ranks, shape.num_topk, is_permuted);
  return plan;
}

CombinePlan combine_plan(int num_tokens, int num_rows, int row_bytes, int num_weights, int num_sms, int num_topk,
                         int num_expert_rows, int num_expert_sms) {
  RowWidths widths{};
  widths.rows = row_bytes;
  widths.weights = static_cast<int64_t>(num_weights) * sizeof(float);
  return {widths, num_tokens, num_rows, num_weights, num_sms, num_topk, num_expert_rows, num_expert_sms};
}

// Waits for the host counts, writes `num_counts` tokens per local expert to `counts`, and returns the rest as the
// fields of HostCounts in cuda_route.py; None when the call has failed.
py::object wait_for_counts(const Communicator& self, uint32_t counts_epoch, uintptr_t stream, uintptr_t counts,
                           int num_counts) {
  const HostCounts* host_counts = nullptr;
  {
    const py::gil_scoped_release release;
    host_counts = self.wait_for_host_counts(counts_epoch, stream_of(stream));
  }
  if (host_counts == nullptr) return py::none();
  std::copy_n(host_counts->num_tokens_per_expert, num_counts, pointer<int32_t>(counts));
  return py::make_tuple(host_counts->status == kNeedsCapacity, host_counts->num_recv, host_counts->num_permuted,
                        host_counts->num_sent_away, host_counts->num_kept, host_counts->max_recv, host_counts->max_sent,
                        host_counts->max_rows, host_counts->num_sent_between, host_counts->max_held);
}

void add_plans(py::module_& module) {
  py::class_<DispatchShape>(module, "DispatchShape")
      .def(py::init(&dispatch_shape), py::kw_only(), py::arg("makes_route"), py::arg("num_tokens"), py::arg("num_topk"),
           py::arg("num_experts"), py::arg("has_weights"), py::arg("hidden"), py::arg("row_type"),
           py::arg("num_scales"), py::arg("scale_type"), py::arg("range_first"), py::arg("range_step"),
           py::arg("range_size"), py::arg("pad_multiple"), py::arg("row_limit"), py::arg("waits_for_counts"),
           py::arg("num_sms"), py::arg("dtype"), py::arg("scale_dtype"), py::arg("has_topk"),
           py::arg("num_worst_tokens"), py::arg("common_bound"), py::arg("refusal"), py::arg("refused_value"),
           py::arg("max_tokens"))
      .def_property_readonly("record_bytes",
                             [](const DispatchShape& shape) { return shape.format.widths().record_bytes(); })
      .def_property_readonly("is_refused",
                             [](const DispatchShape& shape) { return shape.call.refusal != FaultKind::kNone; })
      .def(
          "slot_bytes_for",
          [](const DispatchShape& shape, int64_t num_rows) { return slot_bytes_for(shape.format.widths(), num_rows); },
          py::arg("num_rows"));
  py::class_<DispatchPlan, DispatchShape>(module, "DispatchPlan")
      .def(py::init(&dispatch_plan), py::arg("shape"), py::arg("num_ranks"))
      .def_property_readonly("num_local_experts",
                             [](const DispatchPlan& plan) { return plan.num_experts / plan.num_ranks; })
      .def_property_readonly("route_ints", [](const DispatchPlan& plan) { return plan.route.num_ints; })
      .def_property_readonly("counts_at",  // in the route: what arrives for each local expert, without pads
                             [](const DispatchPlan& plan) {
                               const int num_local = plan.num_experts / plan.num_ranks;
                               return plan.route.num_tokens_per_expert + (plan.pad_multiple > 0 ? num_local : 0);
                             });
  py::class_<CombinePlan>(module, "CombinePlan")
      .def(py::init(&combine_plan), py::kw_only(), py::arg("num_tokens"), py::arg("num_rows"), py::arg("row_bytes"),
           py::arg("num_weights"), py::arg("num_sms"), py::arg("num_topk"), py::arg("num_expert_rows"),
           py::arg("num_expert_sms"))
      .def_property_readonly("record_bytes", [](const CombinePlan& plan) { return plan.widths.record_bytes(); })
      .def(
          "slot_bytes_for",
          [](const CombinePlan& plan, int64_t num_rows) { return slot_bytes_for(plan.widths, num_rows); },
          py::arg("num_rows"));
}

}  // namespace

void add_communicator(py::module_& module) {
  add_plans(module);

  py::enum_<FaultKind>(module, "FaultKind")
      .value("TIMEOUT", FaultKind::kTimeout)
      .value("BAD_EXPERT", FaultKind::kBadExpert)
      .value("OVERFLOW", FaultKind::kOverflow)
      .value("OTHER_CALL", FaultKind::kOtherCall)
      .value("BAD_BOUND", FaultKind::kBadBound)
      .value("TOO_MANY_TOKENS", FaultKind::kTooManyTokens)
      .value("TRANSPORT", FaultKind::kTransport)
      .value("NO_SIGNAL", FaultKind::kNoSignal)
      .value("NONE", FaultKind::kNone);
  py::class_<Fault>(module, "Fault")
      .def_readonly("kind", &Fault::kind)
      .def_readonly("kernel", &Fault::kernel)
      .def_readonly("tag", &Fault::tag)
      .def_readonly("peer", &Fault::peer)
      .def_readonly("witness", &Fault::witness)
      .def_readonly("expected", &Fault::expected)
      .def_readonly("seen", &Fault::seen)
      .def_readonly("waited_s", &Fault::waited_s);

  py::class_<Communicator>(module, "Communicator")
      .def(py::init<int, const std::vector<uintptr_t>&, int, double>(), py::kw_only(), py::arg("rank"),
           py::arg("control"), py::arg("device"), py::arg("timeout_s"))
      .def("set_arena", &Communicator::set_arena, py::arg("arena"), py::arg("slot_bytes"))
      .def(
          "capacity",
          [](const Communicator& self, const DispatchPlan& plan) { return self.capacity(plan.format.widths()); },
          py::arg("plan"))
      .def_property_readonly("default_dispatch_sms", &Communicator::default_dispatch_sms)
      .def(
          "dispatch",
          [](Communicator& self, const DispatchPlan& plan, uintptr_t rows, uintptr_t topk_idx, uintptr_t topk_weights,
             uintptr_t scales, uintptr_t route, int handle, int slot_idx, int slots_wanted, uintptr_t stream) {
            return self.dispatch(plan,
                                 {pointer<uint8_t>(rows), pointer<int64_t>(topk_idx), pointer<float>(topk_weights),
                                  pointer<uint32_t>(scales), pointer<int32_t>(route)},
                                 handle, slot_idx, slots_wanted, stream_of(stream));
          },
          py::arg("plan"), py::arg("rows"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("scales"),
          py::arg("route"), py::arg("handle"), py::arg("slot_idx"), py::arg("slots_wanted"), py::arg("stream"))
      .def(
          "slots_agreed",
          [](const Communicator& self, uintptr_t stream) {
            const py::gil_scoped_release release;
            return self.slots_agreed(stream_of(stream));
          },
          py::arg("stream"))
      .def(
          "duplicate",
          [](Communicator& self, const DispatchPlan& plan, uintptr_t route, uintptr_t kept, uintptr_t probs,
             uintptr_t scales, int slot_idx, int num_rows, int num_recv, int num_sms, uintptr_t stream) {
            self.duplicate(
                plan,
                {pointer<int32_t>(route), pointer<int32_t>(kept), pointer<float>(probs), pointer<uint32_t>(scales)},
                slot_idx, num_rows, num_recv, num_sms, stream_of(stream));
          },
          py::arg("plan"), py::arg("route"), py::arg("kept"), py::arg("probs"), py::arg("scales"), py::arg("slot_idx"),
          py::arg("num_rows"), py::arg("num_recv"), py::arg("num_sms"), py::arg("stream"))
      .def(
          "combine",
          [](Communicator& self, const CombinePlan& plan, uintptr_t rows, uintptr_t weights, uintptr_t bias_0,
             uintptr_t bias_1, uintptr_t out, uintptr_t out_weights, uintptr_t route, uintptr_t expert_rows,
             uintptr_t probs, uintptr_t kept, int handle, uintptr_t stream) {
            self.combine(plan,
                         {pointer<uint8_t>(rows),
                          pointer<float>(weights),
                          {pointer<uint8_t>(bias_0), pointer<uint8_t>(bias_1)},
                          pointer<uint8_t>(out),
                          pointer<float>(out_weights),
                          pointer<int32_t>(route)},
                         {pointer<uint8_t>(expert_rows), pointer<float>(probs), pointer<int32_t>(kept)}, handle,
                         stream_of(stream));
          },
          py::arg("plan"), py::arg("rows"), py::arg("weights"), py::arg("bias_0"), py::arg("bias_1"), py::arg("out"),
          py::arg("out_weights"), py::arg("route"), py::arg("expert_rows"), py::arg("probs"), py::arg("kept"),
          py::arg("handle"), py::arg("stream"))
      .def("wait_for_counts", &wait_for_counts, py::arg("counts_epoch"), py::arg("stream"), py::arg("counts"),
           py::arg("num_counts"))
      .def("take_fault", &Communicator::take_fault);
}

}  // namespace hybrid_ep::bindings
