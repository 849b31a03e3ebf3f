#include "calls/domain.h"

#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/tensors.h"
#include "common/capture.h"
#include "common/check.h"

namespace hybrid_ep::calls {
namespace {

namespace py = pybind11;
using bindings::address_of;
using bindings::Dtype;
using bindings::pointer;

constexpr int kHiddenWithoutRows = 8;  // of a call that sends none: as few as kernels move

DispatchTensors tensors_of(const RowsArgument& rows, uintptr_t topk_idx, uintptr_t topk_weights, uintptr_t route,
                           uintptr_t checksum) {
  return bindings::tensors_of(rows.data_at, topk_idx, topk_weights, rows.scales_at, route, checksum);
}

int64_t kept_ints(int num_recv, int num_topk) { return static_cast<int64_t>(num_recv) * (num_topk + 1); }

}  // namespace

Domain::Domain(py::handle engine, int rank, int num_ranks, int number, Communicator& communicator,
               bindings::OrderedLaunches& launches, bindings::RouteMemory& routes, Slots& slots,
               const py::object& device)
    : engine_(engine),
      rank_(rank),
      num_ranks_(num_ranks),
      number_(number),
      communicator_(communicator),
      launches_(launches),
      routes_(routes),
      slots_(slots),
      traffic_(engine.attr("traffic")),
      device_(device) {
  const py::module_ torch = py::module_::import("torch");
  make_zeros_ =
      py::module_::import("functools")
          .attr("partial")(torch.attr("zeros"), py::arg("dtype") = torch.attr("int32"), py::arg("device") = device);
}

py::tuple Domain::dispatch(py::handle request) {
  const DispatchArguments given(request, rank_, num_ranks_);
  Routed routed = launch(given);
  const auto& [begun, sent, piece, plan, route, num_rows] = routed;
  if (given.sizes.pad_multiple == 0) {
    const SlotResults results = routed.sent.lease.results(plan, num_rows, /*is_by_expert=*/false);
    end(begun);
    return py::make_tuple(results.rows, results.scales, results.experts, results.weights, counts_of(routed),
                          rank_prefix(routed), std::move(routed.route), py::none());
  }
  // A handle holds no slot, so the rows of copies move to memory of its own.
  const auto kept = routes_.take(kept_ints(route.num_recv, plan.num_topk), begun.number(), sent.lease.is_captured());
  uintptr_t probs_at = 0;
  py::object probs = py::none();
  if (!given.topk_weights.is_none()) probs = device_.new_tensor({num_rows}, {1}, Dtype::kFloat32, &probs_at);
  const auto [rows, scales] = duplicate(
      given.rows, routed.sent, plan, route.num_recv, num_rows, given.num_expert_sms,
      {pointer<int32_t>(piece.address), pointer<int32_t>(kept.address), pointer<float>(probs_at), nullptr}, begun);
  end(begun);
  py::object counts = counts_of(routed);
  if (counts.is_none()) counts = part_of_route(routed, plan.route.returned_counts, {num_local(plan)}, {kInt, 64});
  const py::tuple by_expert =
      py::make_tuple(part_of_route(routed, plan.route.overflow, {1}, {kInt, 32}), kept.chunk, kept.address);
  return py::make_tuple(rows, scales, py::none(), probs, counts, rank_prefix(routed), std::move(routed.route),
                        by_expert);
}

py::tuple Domain::dispatch_along(py::handle request) {
  const AlongArguments given(request);
  const Route& route = *given.handle.route;
  const Begun begun = begin();
  const DispatchPlan plan = DispatchPlan::of(given.sizes, rank_, num_ranks_);
  Sent sent = send_along(plan, given.rows, route, begun);
  if (!given.handle.is_by_expert) {
    const SlotResults results = sent.lease.results(plan, route.num_recv, /*is_by_expert=*/false);
    end(begun);
    return py::make_tuple(results.rows, results.scales);
  }
  given.handle.kept.attr("chunk").attr("note_use")(begun.number());
  const auto [rows, scales] =
      duplicate(given.rows, sent, plan, route.num_recv, given.handle.num_permuted, given.num_expert_sms,
                {pointer<int32_t>(route.address), pointer<int32_t>(given.handle.kept_at), nullptr, nullptr}, begun);
  end(begun);
  return py::make_tuple(rows, scales);
}

py::tuple Domain::combine(py::handle request, py::handle handle) {
  const CombineArguments given(request, handle);
  const Begun begun = begin();
  const py::object data = aligned(given.data);
  CombineTensors tensors{};
  tensors.rows = pointer<uint8_t>(address_of(data));
  tensors.num_rows = given.num_rows;
  tensors.weights = pointer<float>(address_of(given.weights));
  if (!given.handle.is_by_expert) return sum(given, begun, tensors, {});
  // The kernel sums the copies of a row first.
  const int num_recv = given.handle.route->num_recv;
  given.handle.kept.attr("begin_combine")(py::cast(communicator_, py::return_value_policy::reference), num_recv,
                                          given.plan.num_topk, begun.number());
  const ExpertTensors copies{tensors.rows, given.num_rows, tensors.weights, pointer<int32_t>(given.handle.kept_at)};
  uintptr_t sums_at = 0, weights_at = 0;
  const py::object sums = new_matrix(num_recv, given.hidden, Dtype::kBfloat16, &sums_at);
  const py::object weights = new_matrix(num_recv, given.plan.num_weights, Dtype::kFloat32, &weights_at);
  tensors.rows = pointer<uint8_t>(sums_at);
  tensors.num_rows = num_recv;
  tensors.weights = pointer<float>(weights_at);
  return sum(given, begun, tensors, copies);
}

py::object Domain::sent_topk_idx(const Route& route, int num_tokens, int num_topk) const {
  return bindings::make_tensor(route.address + route.topk_at * sizeof(int32_t), {num_tokens, num_topk}, {kInt, 64},
                               communicator_.device(), [memory = route.chunk.attr("memory")] {});
}

void Domain::refuse_dispatch(int refusal) {
  DispatchRequest sizes{};
  sizes.hidden = kHiddenWithoutRows;
  sizes.scale_dtype = kAbsent;
  sizes.num_topk = 1;
  sizes.num_experts = num_ranks_;
  sizes.has_topk = true;
  sizes.expert_range = ExpertRange{0, num_ranks_};
  sizes.bound = 0;
  sizes.refusal = refusal;
  const DispatchPlan plan = DispatchPlan::of(sizes, rank_, num_ranks_);
  const Begun begun = begin();
  SlotLease lease = slots_.lease(begun.stream);
  const auto piece = routes_.take(plan.route.num_ints, begun.number(), /*alone=*/false);
  send(plan, bindings::tensors_of(0, 0, 0, 0, piece.address), kAbsent, std::move(lease), begun.stream);
  launches_.order().end();
}

void Domain::refuse_combine(int refusal) {
  CombinePlan plan{};
  plan.num_topk = 1;
  plan.num_experts = num_ranks_;
  plan.widths.rows = kHiddenWithoutRows * bytes_of(kBf16);
  plan.refusal = refusal;
  combine_without_rows(plan, 0, begin().stream);
  count();
  launches_.order().end();
}

Domain::Begun Domain::begin() const {
  static PyObject* const is_quiet = PyUnicode_InternFromString("is_quiet");
  const auto quiet = py::reinterpret_steal<py::object>(PyObject_GetAttr(engine_.ptr(), is_quiet));
  if (!quiet) throw py::error_already_set();
  if (quiet.ptr() != Py_True || communicator_.has_fault()) {
    return {bindings::stream_of(engine_.attr("_begin")().cast<uintptr_t>()), true};
  }
  const cudaStream_t stream = launches_.current();
  launches_.order().begin(stream);
  return {stream, false};
}

void Domain::end(const Begun& begun) const {
  begun.is_after_fault ? static_cast<void>(engine_.attr("_end")()) : launches_.order().end();
}

Domain::Routed Domain::launch(const DispatchArguments& given) {
  const DispatchRequest& sizes = given.sizes;
  const Begun begun = begin();
  if (!sizes.bound && capture_of(begun.stream).id != 0) {
    throw ConfigError(
        "a captured dispatch has no bound; allowed: num_worst_tokens, num_permuted_tokens or do_cpu_sync=False");
  }
  const DispatchPlan plan = DispatchPlan::of(sizes, rank_, num_ranks_);
  const bool is_by_expert = sizes.pad_multiple > 0;
  const int max_rows = sizes.bound ? sizes.common_bound.value_or(*sizes.bound) : 0;
  slots_.require_growth_is_possible(plan.slot_bytes_for(max_rows));
  SlotLease lease = slots_.lease(begun.stream);
  const auto piece = routes_.take(plan.route.num_ints, begun.number(), lease.is_captured());
  const DispatchTensors tensors = tensors_of(given.rows, address_of(given.topk_idx), address_of(given.topk_weights),
                                             piece.address, given.checksum_at);
  Sent sent = send(plan, tensors, given.again, std::move(lease), begun.stream);
  if (plan.call.refusal != FaultKind::kNone) {
    const py::object text_of = py::module_::import("hybrid_ep.engine.cuda.plan").attr("refusal_of");
    throw ConfigError(
        text_of(plan.call.refusal, rank_, plan.call.refused_value, plan.call.allowed).cast<std::string>());
  }
  Route route{};
  route.chunk = piece.chunk;
  route.address = piece.address;
  route.counts_at = plan.route.num_tokens_per_expert + (is_by_expert ? num_local(plan) : 0);
  route.topk_at = plan.route.topk_idx;
  route.number = dispatch_number(number_, engine_.attr("num_calls").cast<int64_t>());
  route.stream = begun.number();
  int num_rows = 0;
  if (sizes.bound) {
    num_rows = *sizes.bound;
    // By expert the bound counts copies, and more rows than that may arrive when it is exceeded.
    route.num_recv = is_by_expert ? communicator_.num_records(plan) : num_rows;
    route.max_recv = max_rows;
    route.max_sent = plan.most_sent();
    route.num_records = plan.num_records;
  } else {
    const HostCounts& counts = *sent.counts;
    num_rows = is_by_expert ? counts.num_permuted : counts.num_recv;
    route.num_recv = counts.num_recv;
    route.max_recv = is_by_expert ? counts.max_rows : counts.max_recv;
    route.max_sent = counts.max_sent;
    route.num_sent_away = counts.num_sent_away;
    route.num_from_away = counts.num_recv - counts.num_kept;
    count_traffic(counts.num_sent_away * plan.format.widths().record_bytes());
  }
  return {begun, std::move(sent), piece, plan, std::move(route), num_rows};
}

Domain::Sent Domain::send(const DispatchPlan& plan, const DispatchTensors& tensors, int handle, SlotLease lease,
                          cudaStream_t stream) {
  while (true) {
    const uint32_t counts_epoch =
        communicator_.dispatch(plan, tensors, handle, lease.slot_idx(), lease.slots_wanted(), stream);
    count();
    if (counts_epoch == 0 || plan.call.refusal != FaultKind::kNone) return {std::move(lease), nullptr};
    const HostCounts* const counts = bindings::wait_for_counts(communicator_, counts_epoch, stream);
    if (counts == nullptr) engine_.attr("_raise_failed")();
    if (counts->status != kNeedsCapacity) return {std::move(lease), counts};
    // No rank has sent. All read that from the same counts, grow their slots, and start again.
    lease.give_back();
    slots_.ensure(plan.slot_bytes_for(counts->max_rows), py::none());
    lease = slots_.lease(stream);
  }
}

Domain::Sent Domain::send_along(const DispatchPlan& plan, const RowsArgument& rows, const Route& route,
                                const Begun& begun) {
  route.note_use(begun.number());
  slots_.require_growth_is_possible(plan.slot_bytes_for(route.max_recv));
  Sent sent =
      send(plan, tensors_of(rows, 0, 0, route.address, 0), route.number, slots_.lease(begun.stream), begun.stream);
  count_traffic(route.num_sent_away * plan.format.widths().record_bytes());
  return sent;
}

py::tuple Domain::sum(const CombineArguments& given, const Begun& begun, CombineTensors tensors,
                      const ExpertTensors& experts) {
  const Route& route = *given.handle.route;
  const CombinePlan& plan = given.plan;
  route.note_use(begun.number());
  const auto compare = [&] {
    CombinePlan compared = plan;
    compared.num_tokens = 0;  // which ranks compare as if it had tokens
    const py::cpp_function launch([&] { combine_without_rows(compared, route.number, begun.stream); });
    engine_.attr("_compare")(launch);
  };
  const int64_t num_bytes = slot_bytes_for(plan.widths, route.max_sent);
  if (num_bytes > slots_.slot_bytes()) slots_.ensure(num_bytes, py::cpp_function(compare));
  slots_.note_use(begun.stream);
  const py::object bias[] = {aligned(given.bias[0]), aligned(given.bias[1])};
  uintptr_t out_at = 0, out_weights_at = 0;
  const py::object out = new_matrix(plan.num_tokens, given.hidden, Dtype::kBfloat16, &out_at);
  const py::object out_weights = new_matrix(plan.num_tokens, plan.num_weights, Dtype::kFloat32, &out_weights_at);
  for (size_t i = 0; i < 2; ++i) tensors.bias[i] = pointer<uint8_t>(address_of(bias[i]));
  tensors.out = pointer<uint8_t>(out_at);
  tensors.out_weights = pointer<float>(out_weights_at);
  tensors.route = pointer<int32_t>(route.address);
  communicator_.combine(plan, tensors, experts, route.number, begun.stream);
  count();
  count_traffic(route.num_from_away * plan.widths.record_bytes());
  end(begun);
  return py::make_tuple(out, out_weights);
}

void Domain::combine_without_rows(const CombinePlan& plan, int handle, cudaStream_t stream) {
  const py::object no_rows = make_zeros_(num_ranks_ * num_ranks_);  // a route
  CombineTensors tensors{};
  tensors.route = pointer<int32_t>(address_of(no_rows));
  communicator_.combine(plan, tensors, {}, handle, stream);
}

py::object Domain::counts_of(const Routed& routed) const {
  if (routed.sent.counts == nullptr) return py::none();
  py::list counts(num_local(routed.plan));
  for (size_t e = 0; e < counts.size(); ++e) counts[e] = py::int_(routed.sent.counts->num_tokens_per_expert[e]);
  return counts;
}

py::object Domain::part_of_route(const Routed& routed, int64_t offset, std::vector<int64_t> shape,
                                 ElementType type) const {
  return bindings::make_tensor(routed.piece.address + offset * sizeof(int32_t), std::move(shape), type,
                               communicator_.device(), [memory = routed.piece.memory] {});
}

py::object Domain::rank_prefix(const Routed& routed) const {
  return part_of_route(routed, routed.plan.route.rank_prefix, {num_ranks_, num_ranks_}, {kInt, 32});
}

std::pair<py::object, py::object> Domain::duplicate(const RowsArgument& rows, Sent& sent, const DispatchPlan& plan,
                                                    int num_recv, int num_rows, int num_sms, DuplicateTensors tensors,
                                                    const Begun& begun) {
  py::object scales = py::none();
  if (!rows.scales.is_none()) scales = rows.scales.attr("new_empty")(py::make_tuple(num_rows, rows.num_scales));
  tensors.scales = pointer<uint32_t>(address_of(scales));
  communicator_.duplicate(plan, tensors, sent.lease.slot_idx(), num_rows, num_recv, num_sms, begun.stream);
  return {sent.lease.results(plan, num_rows, /*is_by_expert=*/true).rows, scales};
}

py::object Domain::new_matrix(int num_rows, int num_columns, Dtype dtype, uintptr_t* address) const {
  if (num_columns == 0) return py::none();
  return device_.new_tensor({num_rows, num_columns}, {num_columns, 1}, dtype, address);
}

int Domain::num_local(const DispatchPlan& plan) { return plan.num_experts / plan.num_ranks; }

void Domain::count() const {
  static PyObject* const name = PyUnicode_InternFromString("num_calls");
  const auto before = py::reinterpret_steal<py::object>(PyObject_GetAttr(engine_.ptr(), name));
  if (!before) throw py::error_already_set();
  const py::int_ now(before.cast<int64_t>() + 1);
  if (PyObject_SetAttr(engine_.ptr(), name, now.ptr()) != 0) throw py::error_already_set();
}

void Domain::count_traffic(int64_t num_bytes) const {
  if (num_bytes != 0) traffic_.attr("within_domain") = traffic_.attr("within_domain").cast<int64_t>() + num_bytes;
}

void add_domain(py::module_& module) {
  py::class_<Route>(module, "Route")
      .def_readonly("chunk", &Route::chunk)
      .def_readonly("address", &Route::address)
      .def_readonly("counts_at", &Route::counts_at)
      .def_readonly("num_recv", &Route::num_recv)
      .def_readonly("max_recv", &Route::max_recv)
      .def_readonly("stream", &Route::stream)
      .def("__deepcopy__", [](const py::object& self, const py::dict&) { return self; });  // nothing in it changes
  py::class_<Domain>(module, "Domain")
      .def(py::init<py::handle, int, int, int, Communicator&, bindings::OrderedLaunches&, bindings::RouteMemory&,
                    Slots&, const py::object&>(),
           py::kw_only(), py::arg("engine"), py::arg("rank"), py::arg("num_ranks"), py::arg("number"),
           py::arg("communicator"), py::arg("launches"), py::arg("routes"), py::arg("slots"), py::arg("device"))
      .def("dispatch", &Domain::dispatch, py::arg("request"))
      .def("dispatch_along", &Domain::dispatch_along, py::arg("request"))
      .def("combine", &Domain::combine, py::arg("request"), py::arg("handle"))
      .def("sent_topk_idx", &Domain::sent_topk_idx, py::arg("route"), py::arg("num_tokens"), py::arg("num_topk"))
      .def("refuse_dispatch", &Domain::refuse_dispatch, py::arg("refusal"))
      .def("refuse_combine", &Domain::refuse_combine, py::arg("refusal"));
}

}  // namespace hybrid_ep::calls
