// Plans as Python makes them, for calls between domains.
#include <optional>
#include <tuple>
#include <utility>

#include "bindings/cuda/bindings.h"
#include "calls/request.h"

namespace hybrid_ep::calls {
namespace {

namespace py = pybind11;

// The sizes of a dispatch, by name: see DispatchRequest in runtime/plan.h. None of them is positional.
template <typename Plan>
Plan plan_of(int rank, int num_ranks, int num_tokens, int hidden, int dtype, int num_topk, int num_experts,
             int num_scales, int scale_dtype, bool has_topk, bool has_weights,
             std::optional<std::pair<int, int>> expert_range, int pad_multiple, std::optional<int> bound,
             std::optional<int> common_bound, std::optional<int> num_sms, std::optional<int> max_tokens,
             std::optional<int> num_slots, std::optional<int> num_mapped_ranks, bool drops_rows,
             std::optional<int> refusal) {
  DispatchRequest sizes{};
  sizes.num_tokens = num_tokens;
  sizes.hidden = hidden;
  sizes.dtype = dtype;
  sizes.num_scales = num_scales;
  sizes.scale_dtype = scale_dtype;
  sizes.num_topk = num_topk;
  sizes.num_experts = num_experts;
  sizes.has_topk = has_topk;
  sizes.has_weights = has_weights;
  if (expert_range) sizes.expert_range = ExpertRange{expert_range->first, expert_range->second};
  sizes.pad_multiple = pad_multiple;
  sizes.bound = bound;
  sizes.common_bound = common_bound;
  sizes.num_sms = num_sms;
  sizes.max_tokens = max_tokens;
  sizes.num_slots = num_slots;
  sizes.num_mapped_ranks = num_mapped_ranks;
  sizes.drops_rows = drops_rows;
  sizes.refusal = refusal;
  require_sizes(num_experts, hidden, dtype);
  return Plan::of(sizes, rank, num_ranks);
}

template <typename Plan, typename Class>
void add_constructor(Class& plan) {
  const py::none none;
  plan.def(py::init(&plan_of<Plan>), py::kw_only(), py::arg("rank"), py::arg("num_ranks"), py::arg("num_tokens"),
           py::arg("hidden"), py::arg("dtype"), py::arg("num_topk"), py::arg("num_experts"), py::arg("num_scales") = 0,
           py::arg("scale_dtype") = kAbsent, py::arg("has_topk") = true, py::arg("has_weights") = false,
           py::arg("expert_range") = none, py::arg("pad_multiple") = 0, py::arg("bound") = none,
           py::arg("common_bound") = none, py::arg("num_sms") = none, py::arg("max_tokens") = none,
           py::arg("num_slots") = none, py::arg("num_mapped_ranks") = none, py::arg("drops_rows") = false,
           py::arg("refusal") = none);
}

// What is wrong with this rank's arguments, the value, and what is allowed; None where nothing is.
std::optional<std::tuple<FaultKind, int, int>> refusal_of(const DispatchShape& shape) {
  if (shape.call.refusal == FaultKind::kNone) return std::nullopt;
  return std::tuple{shape.call.refusal, shape.call.refused_value, shape.call.allowed};
}

CombinePlan combine_plan_of(int num_tokens, int hidden, int num_topk, int num_experts, int num_weights,
                            std::optional<int> num_sms, std::optional<int> refusal) {
  require_sizes(num_experts, hidden, kBf16);
  CombinePlan plan{};
  plan.num_tokens = num_tokens;
  plan.num_topk = num_topk;
  plan.num_experts = num_experts;
  plan.num_weights = num_weights;
  plan.num_sms = num_sms.value_or(0);
  plan.refusal = refusal;
  plan.widths.rows = hidden * bytes_of(kBf16);
  plan.widths.weights = static_cast<int64_t>(num_weights) * sizeof(float);
  return plan;
}

}  // namespace

void add_plans(py::module_& module) {
  py::class_<DispatchShape> shape(module, "DispatchShape");
  add_constructor<DispatchShape>(shape);
  shape.def_readonly("num_tokens", &DispatchShape::num_tokens)
      .def_property_readonly("refusal", &refusal_of)
      .def_property_readonly("record_bytes",
                             [](const DispatchShape& shape) { return shape.format.widths().record_bytes(); })
      .def("slot_bytes_for", &DispatchShape::slot_bytes_for, py::arg("num_rows"));
  py::class_<DispatchPlan, DispatchShape> plan(module, "DispatchPlan");
  add_constructor<DispatchPlan>(plan);
  plan.def_property_readonly("route_ints", [](const DispatchPlan& plan) { return plan.route.num_ints; });
  py::class_<CombinePlan>(module, "CombinePlan")
      .def(py::init(&combine_plan_of), py::kw_only(), py::arg("num_tokens"), py::arg("hidden"), py::arg("num_topk"),
           py::arg("num_experts"), py::arg("num_weights") = 0, py::arg("num_sms") = py::none(),
           py::arg("refusal") = py::none())
      .def_property_readonly("record_bytes", [](const CombinePlan& plan) { return plan.widths.record_bytes(); })
      .def(
          "slot_bytes_for",
          [](const CombinePlan& plan, int64_t num_rows) { return slot_bytes_for(plan.widths, num_rows); },
          py::arg("num_rows"));
}

}  // namespace hybrid_ep::calls
