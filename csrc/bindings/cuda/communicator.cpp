#include "runtime/communicator.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "common/check.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

// The fields of a shape of hybrid_ep/engine/cuda/plan.py.
struct Fields {
  const py::object& shape;

  int integer(const char* name) const { return shape.attr(name).cast<int>(); }
  bool flag(const char* name) const { return shape.attr(name).cast<bool>(); }
  std::optional<int> optional(const char* name) const { return shape.attr(name).cast<std::optional<int>>(); }
};

DispatchRequest request_of(const py::object& shape) {
  const Fields fields{shape};
  DispatchRequest request{};
  request.num_tokens = fields.integer("num_tokens");
  request.hidden = fields.integer("hidden");
  request.dtype = fields.integer("dtype_code");
  request.num_scales = fields.integer("num_scales");
  request.scale_dtype = fields.integer("scale_dtype_code");
  request.num_topk = fields.integer("num_topk");
  request.num_experts = fields.integer("num_experts");
  request.has_topk = fields.flag("has_topk");
  request.has_weights = fields.flag("has_weights");
  if (const auto range = shape.attr("expert_range").cast<std::optional<std::pair<int, int>>>()) {
    request.expert_range = ExpertRange{range->first, range->second};
  }
  request.pad_multiple = fields.integer("pad_multiple");
  request.bound = fields.optional("bound");
  request.common_bound = fields.optional("common_bound");
  request.num_sms = fields.optional("num_sms");
  request.max_tokens = fields.optional("max_tokens");
  request.num_slots = fields.optional("num_slots");
  request.num_mapped_ranks = fields.optional("num_mapped_ranks");
  request.num_records = fields.integer("num_records");
  request.drops_rows = fields.flag("drops_rows");
  request.refusal = fields.optional("refusal");
  return request;
}

template <typename Plan>
Plan plan_of(const py::object& shape, int rank, int num_ranks) {
  return Plan::of(request_of(shape), rank, num_ranks);
}

// What is wrong with this rank's arguments, the value, and what is allowed; None where nothing is.
std::optional<std::tuple<FaultKind, int, int>> refusal_of(const DispatchShape& shape) {
  if (shape.call.refusal == FaultKind::kNone) return std::nullopt;
  return std::tuple{shape.call.refusal, shape.call.refused_value, shape.call.allowed};
}

CombinePlan combine_plan_of(const py::object& shape) {
  const Fields fields{shape};
  CombinePlan plan{};
  plan.num_tokens = fields.integer("num_tokens");
  plan.num_topk = fields.integer("num_topk");
  plan.num_experts = fields.integer("num_experts");
  plan.num_weights = fields.integer("num_weights");
  plan.num_sms = fields.optional("num_sms").value_or(0);
  plan.num_expert_sms = fields.optional("num_expert_sms").value_or(0);
  plan.refusal = fields.optional("refusal");
  plan.widths.rows = fields.integer("row_bytes");
  plan.widths.weights = static_cast<int64_t>(plan.num_weights) * sizeof(float);
  return plan;
}

// Addresses of experts and of spare slots, and bytes of an expert.
using ExpertTuples = std::vector<std::tuple<uintptr_t, uintptr_t, int64_t>>;

std::vector<ExpertTensor> expert_tensors(const ExpertTuples& given) {
  std::vector<ExpertTensor> tensors;
  for (const auto& [experts, spare, item_bytes] : given) {
    tensors.push_back({pointer<uint8_t>(experts), pointer<uint8_t>(spare), item_bytes});
  }
  return tensors;
}

void add_plans(py::module_& module) {
  py::class_<DispatchShape>(module, "DispatchShape")
      .def(py::init(&plan_of<DispatchShape>), py::arg("shape"), py::arg("rank"), py::arg("num_ranks"))
      .def_readonly("num_tokens", &DispatchShape::num_tokens)
      .def_property_readonly("refusal", &refusal_of)
      .def_property_readonly("record_bytes",
                             [](const DispatchShape& shape) { return shape.format.widths().record_bytes(); })
      .def_property_readonly("is_refused",
                             [](const DispatchShape& shape) { return shape.call.refusal != FaultKind::kNone; })
      .def("slot_bytes_for", &DispatchShape::slot_bytes_for, py::arg("num_rows"));
  py::class_<DispatchPlan, DispatchShape>(module, "DispatchPlan")
      .def(py::init(&plan_of<DispatchPlan>), py::arg("shape"), py::arg("rank"), py::arg("num_ranks"))
      .def_property_readonly("num_local_experts",
                             [](const DispatchPlan& plan) { return plan.num_experts / plan.num_ranks; })
      .def_property_readonly("most_sent", &DispatchPlan::most_sent)
      .def_property_readonly("route_ints", [](const DispatchPlan& plan) { return plan.route.num_ints; })
      .def_property_readonly("counts_at",  // in the route: what arrives for each local expert, without pads
                             [](const DispatchPlan& plan) {
                               const int num_local = plan.num_experts / plan.num_ranks;
                               return plan.route.num_tokens_per_expert + (plan.pad_multiple > 0 ? num_local : 0);
                             });
  py::class_<CombinePlan>(module, "CombinePlan")
      .def(py::init(&combine_plan_of), py::arg("shape"))
      .def_property_readonly("record_bytes", [](const CombinePlan& plan) { return plan.widths.record_bytes(); })
      .def(
          "slot_bytes_for",
          [](const CombinePlan& plan, int64_t num_rows) { return slot_bytes_for(plan.widths, num_rows); },
          py::arg("num_rows"));
}

}  // namespace

const HostCounts* wait_for_counts(const Communicator& communicator, uint32_t counts_epoch, cudaStream_t stream) {
  const py::gil_scoped_release release;
  return communicator.wait_for_host_counts(counts_epoch, stream);
}

py::object fields_of(const HostCounts* host_counts) {
  if (host_counts == nullptr) return py::none();
  return py::make_tuple(host_counts->status == kNeedsCapacity, host_counts->num_recv, host_counts->num_permuted,
                        host_counts->num_sent_away, host_counts->num_kept, host_counts->max_recv, host_counts->max_sent,
                        host_counts->max_rows, host_counts->num_sent_between, host_counts->max_held);
}

void add_communicator(py::module_& module) {
  add_plans(module);
  module.attr("dispatch_number_bits") = kDispatchNumberBits;
  module.def("dispatch_number", &dispatch_number, py::arg("buffer"), py::arg("number"));

  py::enum_<FaultKind>(module, "FaultKind")
      .value("TIMEOUT", FaultKind::kTimeout)
      .value("BAD_EXPERT", FaultKind::kBadExpert)
      .value("OVERFLOW", FaultKind::kOverflow)
      .value("OTHER_CALL", FaultKind::kOtherCall)
      .value("BAD_BOUND", FaultKind::kBadBound)
      .value("TOO_MANY_TOKENS", FaultKind::kTooManyTokens)
      .value("TRANSPORT", FaultKind::kTransport)
      .value("NO_SIGNAL", FaultKind::kNoSignal)
      .value("REFUSED", FaultKind::kRefused)
      .value("NONE", FaultKind::kNone);
  py::class_<Fault>(module, "Fault")
      .def_readonly("kind", &Fault::kind)
      .def_readonly("kernel", &Fault::kernel)
      .def_readonly("tag", &Fault::tag)
      .def_readonly("peer", &Fault::peer)
      .def_readonly("witness", &Fault::witness)
      .def_readonly("missed", &Fault::missed)
      .def_readonly("expected", &Fault::expected)
      .def_readonly("seen", &Fault::seen)
      .def_readonly("waited_s", &Fault::waited_s);

  py::class_<Communicator>(module, "Communicator")
      .def(py::init<int, const std::vector<uintptr_t>&, int, double>(), py::kw_only(), py::arg("rank"),
           py::arg("control"), py::arg("device"), py::arg("timeout_s"))
      .def("set_arena", &Communicator::set_arena, py::arg("arena"), py::arg("slot_bytes"), py::arg("number"))
      .def(
          "num_records", [](const Communicator& self, const DispatchPlan& plan) { return self.num_records(plan); },
          py::arg("plan"))
      .def_property_readonly("default_dispatch_sms", &Communicator::default_dispatch_sms)
      .def(
          "dispatch",
          [](Communicator& self, const DispatchPlan& plan, uintptr_t rows, uintptr_t topk_idx, uintptr_t topk_weights,
             uintptr_t scales, uintptr_t route, uintptr_t mapping_checksum, int handle, int slot_idx, int slots_wanted,
             uintptr_t stream) {
            return self.dispatch(plan, tensors_of(rows, topk_idx, topk_weights, scales, route, mapping_checksum),
                                 handle, slot_idx, slots_wanted, stream_of(stream));
          },
          py::arg("plan"), py::arg("rows"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("scales"),
          py::arg("route"), py::arg("mapping_checksum"), py::arg("handle"), py::arg("slot_idx"),
          py::arg("slots_wanted"), py::arg("stream"))
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
          [](Communicator& self, const CombinePlan& plan, Address rows, int num_rows, Address weights, Address bias_0,
             Address bias_1, Address out, Address out_weights, Address route, Address expert_rows,
             std::optional<int> num_expert_rows, Address probs, Address kept, int handle, uintptr_t stream) {
            self.combine(
                plan,
                {pointer<uint8_t>(rows),
                 num_rows,
                 pointer<float>(weights),
                 {pointer<uint8_t>(bias_0), pointer<uint8_t>(bias_1)},
                 pointer<uint8_t>(out),
                 pointer<float>(out_weights),
                 pointer<int32_t>(route)},
                {pointer<uint8_t>(expert_rows), num_expert_rows, pointer<float>(probs), pointer<int32_t>(kept)}, handle,
                stream_of(stream));
          },
          py::arg("plan"), py::arg("rows"), py::arg("num_rows"), py::arg("weights"), py::arg("bias_0"),
          py::arg("bias_1"), py::arg("out"), py::arg("out_weights"), py::arg("route"), py::arg("expert_rows"),
          py::arg("num_expert_rows"), py::arg("probs"), py::arg("kept"), py::arg("handle"), py::arg("stream"))
      .def_property_readonly("default_copy_sms", &Communicator::default_copy_sms)
      .def(
          "add_peer_memory",
          [](Communicator& self, uintptr_t begin, int64_t num_bytes, uintptr_t peers) {
            self.add_peer_memory(pointer<uint8_t>(begin), num_bytes, pointer<uint8_t*>(peers));
          },
          py::arg("begin"), py::arg("num_bytes"), py::arg("peers"))
      .def(
          "staging_bytes",
          [](const Communicator& self, const ExpertTuples& tensors, int num_slots) {
            return self.staging_bytes(expert_tensors(tensors), num_slots);
          },
          py::arg("tensors"), py::arg("num_slots"))
      .def(
          "copy_experts",
          [](Communicator& self, const ExpertTuples& tensors, uintptr_t mapping, int num_slots, int num_local,
             int num_sms, bool only_compares, uintptr_t stream) {
            self.copy_experts(expert_tensors(tensors), pointer<int64_t>(mapping), num_slots, num_local, num_sms,
                              only_compares, stream_of(stream));
          },
          py::kw_only(), py::arg("tensors"), py::arg("mapping"), py::arg("num_slots"), py::arg("num_local"),
          py::arg("num_sms"), py::arg("only_compares"), py::arg("stream"))
      // Writes `num_counts` tokens per local expert to `counts`, and returns the rest as fields_of().
      .def(
          "wait_for_counts",
          [](const Communicator& self, uint32_t counts_epoch, uintptr_t stream, uintptr_t counts, int num_counts) {
            const HostCounts* host_counts = wait_for_counts(self, counts_epoch, stream_of(stream));
            if (host_counts != nullptr) {
              std::copy_n(host_counts->num_tokens_per_expert, num_counts, pointer<int32_t>(counts));
            }
            return fields_of(host_counts);
          },
          py::arg("counts_epoch"), py::arg("stream"), py::arg("counts"), py::arg("num_counts"))
      .def("take_fault", &Communicator::take_fault)
      .def_property_readonly("has_fault", &Communicator::has_fault);
}

}  // namespace hybrid_ep::bindings
