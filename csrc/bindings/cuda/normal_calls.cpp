// Dispatches and combines that repeat an earlier call, within a domain and with rows by source.
#include <optional>
#include <tuple>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/engine_calls.h"
#include "bindings/cuda/fast_call.h"
#include "bindings/cuda/named_tuple.h"
#include "bindings/cuda/new_tensor.h"
#include "bindings/cuda/route_memory.h"
#include "bindings/cuda/slot_tensors.h"
#include "bindings/cuda/topk_probs.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

// Dispatches that make their route.
class RepeatedDispatch {
 public:
  // Without a bound each call waits for its counts. `max_rows`: the most rows of any rank, with a bound. `dense`: makes
  // probabilities of the experts of received rows, which are returned in place of weights. Then the top-k indices are a
  // copy, which holds no slot.
  RepeatedDispatch(py::handle engine, const DispatchPlan& plan, std::optional<int> bound, int max_rows,
                   int64_t counts_at, bool returns_topk, const std::optional<TopkProbs>& dense, py::object grid,
                   const py::object& route_type, py::object handle_type)
      : calls_(engine, route_type),
        plan_(plan),
        bound_(bound),
        max_rows_(max_rows),
        slot_bytes_(slot_bytes_for(plan.format.widths(), max_rows)),
        counts_at_(counts_at),
        returns_topk_(returns_topk),
        dense_(dense),
        grid_(std::move(grid)),
        handle_type_(std::move(handle_type)) {
    require_dispatch_handle(handle_type_);
  }

  // Takes rows, scales, top-k indices and weights. Returns rows, scales, top-k indices, weights or probabilities,
  // counts, the handle, and a copy of the given top-k indices or None. None: the call is still to be made, in several
  // steps.
  py::object call(FastArguments arguments) {
    const OneCall one_call = calls_.begin_call();
    if (!one_call.is_begun()) return py::none();
    const auto begun = calls_.begin_dispatch(plan_, arguments);
    if (!begun) return py::none();
    auto& slots = begun->slots.cast<SlotTensors&>();
    return bound_ ? bounded(slots, *begun) : waiting(slots, *begun);
  }

 private:
  py::object bounded(SlotTensors& slots, const EngineCalls::BegunDispatch& begun) const {
    const auto& [_, given, piece, stream] = begun;
    if (slot_bytes_ > slots.slot_bytes()) return py::none();
    auto slot = slots.launch(calls_.communicator, plan_, given, kAbsent, stream);
    if (!slot) return py::none();
    const int number = calls_.count();
    const SlotResults made = slot->tensors(plan_, *bound_, piece.memory, piece.address);
    calls_.end();
    const py::object route =
        calls_.make_route(piece, counts_at_, *bound_, max_rows_, max_rows_, 0, 0, 0, number, stream);
    return result(made, py::none(), *bound_, piece, route);
  }

  py::object waiting(SlotTensors& slots, const EngineCalls::BegunDispatch& begun) const {
    const auto& [_, given, piece, stream] = begun;
    auto slot = slots.launch(calls_.communicator, plan_, given, kAbsent, stream);
    if (!slot) return py::none();
    const int number = calls_.count();
    const auto found = calls_.wait(plan_, slot->counts_epoch, stream);
    if (!found) return py::none();
    const SlotResults made = slot->tensors(plan_, found->num_recv, piece.memory, piece.address);
    calls_.end();
    const py::object route =
        calls_.make_route(piece, counts_at_, found->num_recv, found->max_recv, found->max_sent, found->num_sent_away,
                          found->num_recv - found->num_kept, 0, number, stream);
    py::list counts(found->num_tokens_per_expert.size());
    for (size_t e = 0; e < counts.size(); ++e) counts[e] = py::int_(found->num_tokens_per_expert[e]);
    return result(made, counts, found->num_recv, piece, route);
  }

  py::object result(const SlotResults& made, const py::object& counts, int num_recv, const RouteMemory::Piece& piece,
                    const py::object& route) const {
    const py::object handle = make_named(handle_type_, made.rank_prefix, plan_.num_tokens, num_recv, plan_.num_experts,
                                         plan_.num_topk, grid_, route);
    const py::object topk_idx = returns_topk_ ? calls_.topk_of(piece, plan_) : py::none();
    py::object experts = made.experts, weights = made.weights;
    if (dense_ && !weights.is_none()) {
      PyObject* const received[] = {made.experts.ptr(), made.weights.ptr()};
      std::tie(weights, experts) = dense_->sum_weights_and_copy(received);
    }
    return py::make_tuple(made.rows, made.scales, experts, weights, counts, handle, topk_idx);
  }

  EngineCalls calls_;
  DispatchPlan plan_;
  std::optional<int> bound_;
  int max_rows_;
  int64_t slot_bytes_, counts_at_;
  bool returns_topk_;
  std::optional<TopkProbs> dense_;
  py::object grid_, handle_type_;
};

// Dispatches along the routes of handles.
class RepeatedDispatchAlong {
 public:
  // `plan` serves any route: what depends on the route's rows is set for each call.
  RepeatedDispatchAlong(py::handle engine, const DispatchPlan& plan, const py::object& route_type)
      : calls_(engine, route_type), plan_(plan) {}

  // Takes rows, scales and the handle. Returns rows and scales. None: as above.
  py::object call(FastArguments arguments) const {
    const OneCall one_call = calls_.begin_call();
    if (!one_call.is_begun()) return py::none();
    const py::object slots = calls_.slots();
    const std::optional<cudaStream_t> stream = slots.is_none() ? std::nullopt : calls_.begin();
    const auto route = stream ? calls_.route_for(arguments[2], *stream) : std::nullopt;
    if (!route) return py::none();
    const DispatchTensors given = tensors_of(address_of(arguments[0]), 0, 0, address_of(arguments[1]), route->address);
    const RowWidths widths = plan_.format.widths();
    auto& tensors = slots.cast<SlotTensors&>();
    if (slot_bytes_for(widths, route->max_recv) > tensors.slot_bytes()) return py::none();
    auto slot = tensors.launch(calls_.communicator, plan_.along(route->max_recv, 0), given, route->number, *stream);
    if (!slot) return py::none();
    calls_.count();
    calls_.count_traffic(route->num_sent_away * widths.record_bytes());
    const SlotResults made = slot->tensors(plan_, route->num_recv, py::none(), route->address);
    calls_.end();
    return py::make_tuple(made.rows, made.scales);
  }

 private:
  EngineCalls calls_;
  DispatchPlan plan_;
};

// What combines have in common.
class CombineCalls {
 public:
  CombineCalls(py::handle engine, const CombinePlan& plan, const NewTensor& make_out,
               const std::optional<NewTensor>& make_weights, const py::object& route_type)
      : calls_(engine, route_type), plan_(plan), make_out_(make_out), make_weights_(make_weights) {}

  // What a launch needs of the handle.
  struct Begun {
    cudaStream_t stream;
    RouteFields route;
  };

  OneCall begin_call() const { return calls_.begin_call(); }
  // nullopt: the call is still to be made, in several steps. `addresses`: all that must be aligned.
  std::optional<Begun> begin(uintptr_t addresses, py::handle handle) const {
    const py::object slots = calls_.slots();
    const std::optional<cudaStream_t> stream = slots.is_none() ? std::nullopt : calls_.begin();
    const auto route = stream ? calls_.route_for(handle, *stream) : std::nullopt;
    if (!route || addresses % kRowAlignBytes != 0) return std::nullopt;
    if (slot_bytes_for(plan_.widths, route->max_sent) > slots.cast<const SlotTensors&>().slot_bytes())
      return std::nullopt;
    return Begun{*stream, *route};
  }
  // Returns the sums of rows, and those of weights or None.
  std::pair<py::object, py::object> launch(const Begun& begun, uintptr_t rows, uintptr_t weights, uintptr_t bias_0,
                                           uintptr_t bias_1) const {
    uintptr_t out_at = 0, out_weights_at = 0;
    py::object out = make_out_.make(&out_at);
    py::object out_weights = make_weights_ ? make_weights_->make(&out_weights_at) : py::none();
    calls_.communicator.combine(plan_,
                                {pointer<uint8_t>(rows),
                                 begun.route.num_recv,
                                 pointer<float>(weights),
                                 {pointer<uint8_t>(bias_0), pointer<uint8_t>(bias_1)},
                                 pointer<uint8_t>(out_at),
                                 pointer<float>(out_weights_at),
                                 pointer<int32_t>(begun.route.address)},
                                {}, begun.route.number, begun.stream);
    calls_.count();
    calls_.count_traffic(begun.route.num_from_away * plan_.widths.record_bytes());
    calls_.end();
    return {std::move(out), std::move(out_weights)};
  }

 private:
  EngineCalls calls_;
  CombinePlan plan_;
  NewTensor make_out_;
  std::optional<NewTensor> make_weights_;
};

// Combines of rows, and of weights in the columns of the top-k.
class RepeatedCombine {
 public:
  RepeatedCombine(py::handle engine, const CombinePlan& plan, const NewTensor& make_out,
                  const std::optional<NewTensor>& make_weights, const py::object& route_type)
      : calls_(engine, plan, make_out, make_weights, route_type) {}

  // Takes rows, weights, two biases and the handle. Returns the sums of rows and of weights. None: as above.
  py::object call(FastArguments arguments) const {
    const OneCall one_call = calls_.begin_call();
    if (!one_call.is_begun()) return py::none();
    const uintptr_t rows = address_of(arguments[0]), weights = address_of(arguments[1]);
    const uintptr_t bias_0 = address_of(arguments[2]), bias_1 = address_of(arguments[3]);
    const auto begun = calls_.begin(rows | bias_0 | bias_1, arguments[4]);
    if (!begun) return py::none();
    const auto [out, out_weights] = calls_.launch(*begun, rows, weights, bias_0, bias_1);
    return py::make_tuple(out, out_weights);
  }

 private:
  CombineCalls calls_;
};

// Combines of rows, and of probabilities of experts.
class RepeatedDenseCombine {
 public:
  // `received` and `sent`: of the experts of received and of sent rows.
  RepeatedDenseCombine(py::handle engine, const CombinePlan& plan, const NewTensor& make_out,
                       const NewTensor& make_weights, const py::object& route_type, const TopkProbs& received,
                       const TopkProbs& sent)
      : calls_(engine, plan, make_out, make_weights, route_type), received_(received), sent_(sent) {}

  // Takes rows, probabilities, the handle, and top-k indices of received and of sent rows. Returns the sums of rows and
  // of probabilities. None: as above.
  py::object call(FastArguments arguments) const {
    const OneCall one_call = calls_.begin_call();
    if (!one_call.is_begun()) return py::none();
    const uintptr_t rows = address_of(arguments[0]);
    const auto begun = calls_.begin(rows, arguments[2]);
    if (!begun) return py::none();
    PyObject* const received[] = {arguments[3], arguments[1]};
    const py::object weights = received_.to_weights(received);
    const auto [out, out_weights] = calls_.launch(*begun, rows, address_of(weights), 0, 0);
    PyObject* const sent[] = {arguments[4], out_weights.ptr()};
    return py::make_tuple(out, sent_.place_weights(sent));
  }

 private:
  CombineCalls calls_;
  TopkProbs received_, sent_;
};

}  // namespace

void add_normal_calls(py::module_& module) {
  py::class_<RepeatedDispatch>(module, "RepeatedDispatch")
      .def(py::init<py::handle, const DispatchPlan&, std::optional<int>, int, int64_t, bool,
                    const std::optional<TopkProbs>&, py::object, const py::object&, py::object>(),
           py::arg("engine"), py::arg("plan"), py::arg("bound"), py::arg("max_rows"), py::arg("counts_at"),
           py::arg("returns_topk"), py::arg("dense"), py::arg("grid"), py::arg("route_type"), py::arg("handle_type"))
      .def_property_readonly("call", &fast_call<&RepeatedDispatch::call, 4>);
  py::class_<RepeatedDispatchAlong>(module, "RepeatedDispatchAlong")
      .def(py::init<py::handle, const DispatchPlan&, const py::object&>(), py::arg("engine"), py::arg("plan"),
           py::arg("route_type"))
      .def_property_readonly("call", &fast_call<&RepeatedDispatchAlong::call, 3>);
  py::class_<RepeatedCombine>(module, "RepeatedCombine")
      .def(py::init<py::handle, const CombinePlan&, const NewTensor&, const std::optional<NewTensor>&,
                    const py::object&>(),
           py::arg("engine"), py::arg("plan"), py::arg("make_out"), py::arg("make_weights"), py::arg("route_type"))
      .def_property_readonly("call", &fast_call<&RepeatedCombine::call, 5>);
  py::class_<RepeatedDenseCombine>(module, "RepeatedDenseCombine")
      .def(py::init<py::handle, const CombinePlan&, const NewTensor&, const NewTensor&, const py::object&,
                    const TopkProbs&, const TopkProbs&>(),
           py::arg("engine"), py::arg("plan"), py::arg("make_out"), py::arg("make_weights"), py::arg("route_type"),
           py::arg("received"), py::arg("sent"))
      .def_property_readonly("call", &fast_call<&RepeatedDenseCombine::call, 5>);
}

}  // namespace hybrid_ep::bindings
