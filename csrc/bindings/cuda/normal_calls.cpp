// Dispatches and combines that repeat an earlier call, within a domain and with rows by source. Each is one call of
// C++, which takes a slot or memory for the results, launches, and makes the tensors. Python makes a call that needs
// anything else: hybrid_ep/engine/cuda/repeated.py.
#include <array>
#include <optional>
#include <stdexcept>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/fast_call.h"
#include "bindings/cuda/new_tensor.h"
#include "bindings/cuda/ordered_launches.h"
#include "bindings/cuda/route_memory.h"
#include "bindings/cuda/slot_tensors.h"
#include "common/capture.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

py::object field(const py::object& object) { return object; }
template <typename Integer>
py::object field(Integer value) {
  return py::int_(value);
}

// A tuple of a class that is a NamedTuple. Calling the class would take longer than the rest of a call's bookkeeping.
template <typename... Fields>
py::object make_named(const py::object& named, const Fields&... fields) {
  auto* const type = reinterpret_cast<PyTypeObject*>(named.ptr());
  std::array<py::object, sizeof...(Fields)> values{field(fields)...};
  auto made = py::reinterpret_steal<py::object>(type->tp_alloc(type, values.size()));
  if (!made) throw py::error_already_set();
  for (size_t i = 0; i < values.size(); ++i) PyTuple_SET_ITEM(made.ptr(), i, values[i].release().ptr());
  return made;
}

// The fields of a Route in hybrid_ep/engine/cuda/route.py that calls read.
struct RouteFields {
  explicit RouteFields(py::handle route)
      : address(PyLong_AsSize_t(item(route, 1).ptr())),
        num_recv(integer(route, 3)),
        max_recv(integer(route, 4)),
        max_sent(integer(route, 5)),
        num_sent_away(integer(route, 6)),
        num_from_away(integer(route, 7)),
        number(integer(route, 8)),
        stream(PyLong_AsSize_t(item(route, 9).ptr())) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  }

  uintptr_t address;
  int num_recv, max_recv, max_sent, num_sent_away, num_from_away, number;
  uintptr_t stream;

 private:
  static py::handle item(py::handle route, int i) { return PyTuple_GET_ITEM(route.ptr(), i); }
  static int integer(py::handle route, int i) { return static_cast<int>(PyLong_AsLong(item(route, i).ptr())); }
};

// What calls use of their engine, a CudaEngine, which outlives them.
class EngineCalls {
 public:
  // `route_type` is Route.
  EngineCalls(py::handle engine, const py::object& route_type)
      : communicator(engine.attr("_communicator").cast<Communicator&>()),
        routes(engine.attr("_routes").cast<RouteMemory&>()),
        engine_(engine),
        traffic_(engine.attr("traffic")),
        route_type_(route_type),
        launches_(engine.attr("_order").cast<OrderedLaunches&>()),
        number_(engine.attr("number").cast<int>()) {}

  Communicator& communicator;
  RouteMemory& routes;

  // The SlotTensors for a call that can be one call of C++; None: it cannot, for there is more to be done. A call keeps
  // them, because the engine may get others while it waits.
  py::object slots() const { return engine_.attr(slots_now_); }
  // The stream of a call, after the engine's earlier launches; nullopt: a kernel has reported a fault, or the stream is
  // being captured.
  std::optional<cudaStream_t> begin() const {
    if (communicator.has_fault()) return std::nullopt;
    const cudaStream_t stream = launches_.current();
    if (capture_of(stream).id != 0) return std::nullopt;
    launches_.order().begin(stream);
    return stream;
  }
  // The route of a handle; nullopt: an engine of another kind has made it, or its memory belongs to another stream.
  std::optional<RouteFields> route_for(py::handle handle, cudaStream_t stream) const {
    const py::handle state = PyTuple_GET_ITEM(handle.ptr(), kStateOfHandle);
    if (!Py_IS_TYPE(state.ptr(), reinterpret_cast<PyTypeObject*>(route_type_.ptr()))) return std::nullopt;
    const RouteFields route(state);
    return route.stream == reinterpret_cast<uintptr_t>(stream) ? std::optional(route) : std::nullopt;
  }
  // Counts a launch, and returns its number.
  int count() const {
    const int64_t num_calls = engine_.attr(num_calls_).cast<int64_t>() + 1;
    engine_.attr(num_calls_) = num_calls;
    return dispatch_number(number_, num_calls);
  }
  void count_traffic(int64_t num_bytes) const {
    if (num_bytes != 0) traffic_.attr(within_) = traffic_.attr(within_).cast<int64_t>() + num_bytes;
  }
  // Must be called after the last use of the arena.
  void end() const { launches_.order().end(); }

  py::object make_route(const RouteMemory::Piece& piece, int64_t counts_at, int num_recv, int max_recv, int max_sent,
                        int num_sent_away, int num_from_away, int number, cudaStream_t stream) const {
    return make_named(route_type_, piece.chunk, piece.address, counts_at, num_recv, max_recv, max_sent, num_sent_away,
                      num_from_away, number, reinterpret_cast<uintptr_t>(stream));
  }
  [[noreturn]] void raise_failed() const {
    engine_.attr("_raise_failed")();
    throw std::logic_error("CudaEngine._raise_failed has returned");
  }

 private:
  static constexpr int kStateOfHandle = 6;  // in a DispatchHandle

  py::handle engine_;
  py::object traffic_, route_type_;
  OrderedLaunches& launches_;
  int number_;
  py::str num_calls_ = "num_calls", within_ = "within_domain", slots_now_ = "slots_now";
};

// Dispatches that make their route.
class RepeatedDispatch {
 public:
  // Without a bound each call waits for its counts. `max_rows`: the most rows of any rank, with a bound.
  RepeatedDispatch(py::handle engine, const DispatchPlan& plan, std::optional<int> bound, int max_rows,
                   int64_t counts_at, py::object grid, const py::object& route_type, py::object handle_type)
      : calls_(engine, route_type),
        plan_(plan),
        bound_(bound),
        max_rows_(max_rows),
        slot_bytes_(slot_bytes_for(plan.format.widths(), max_rows)),
        counts_at_(counts_at),
        grid_(std::move(grid)),
        handle_type_(std::move(handle_type)) {}

  // Takes rows, scales, top-k indices and weights. Returns rows, scales, top-k indices and weights, counts and the
  // handle. None: the call is still to be made, in several steps.
  py::object call(FastArguments arguments) {
    const py::object slots = calls_.slots();
    const std::optional<cudaStream_t> stream = slots.is_none() ? std::nullopt : calls_.begin();
    if (!stream) return py::none();
    const auto piece = calls_.routes.take(plan_.route.num_ints, reinterpret_cast<uintptr_t>(*stream), /*alone=*/false);
    const DispatchTensors given = tensors_of(address_of(arguments[0]), address_of(arguments[2]),
                                             address_of(arguments[3]), address_of(arguments[1]), piece.address);
    auto& tensors = slots.cast<SlotTensors&>();
    return bound_ ? bounded(tensors, given, piece, *stream) : waiting(tensors, given, piece, *stream);
  }

 private:
  py::object bounded(SlotTensors& slots, const DispatchTensors& given, const RouteMemory::Piece& piece,
                     cudaStream_t stream) const {
    const auto made =
        slots.dispatch(calls_.communicator, plan_, slot_bytes_, *bound_, given, piece.memory, kAbsent, stream);
    if (!made) return py::none();
    const int number = calls_.count();
    calls_.end();
    const py::object route = calls_.make_route(piece, counts_at_, *bound_, max_rows_, max_rows_, 0, 0, number, stream);
    return result(*made, py::none(), *bound_, route);
  }

  py::object waiting(SlotTensors& slots, const DispatchTensors& given, const RouteMemory::Piece& piece,
                     cudaStream_t stream) const {
    const auto waited = slots.dispatch_and_wait(calls_.communicator, plan_, given, piece.memory, stream);
    if (!waited) return py::none();
    const int number = calls_.count();
    if (waited->has_failed) calls_.raise_failed();
    if (!waited->results) return py::none();
    calls_.count_traffic(waited->num_sent_away * plan_.format.widths().record_bytes());
    calls_.end();
    const py::object route =
        calls_.make_route(piece, counts_at_, waited->num_recv, waited->max_recv, waited->max_sent,
                          waited->num_sent_away, waited->num_recv - waited->num_kept, number, stream);
    return result(*waited->results, waited->num_tokens_per_expert, waited->num_recv, route);
  }

  py::object result(const SlotResults& made, const py::object& counts, int num_recv, const py::object& route) const {
    const py::object handle = make_named(handle_type_, made.rank_prefix, plan_.num_tokens, num_recv, plan_.num_experts,
                                         plan_.num_topk, grid_, route);
    return py::make_tuple(made.rows, made.scales, made.experts, made.weights, counts, handle);
  }

  EngineCalls calls_;
  DispatchPlan plan_;
  std::optional<int> bound_;
  int max_rows_;
  int64_t slot_bytes_, counts_at_;
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
    const py::object slots = calls_.slots();
    const std::optional<cudaStream_t> stream = slots.is_none() ? std::nullopt : calls_.begin();
    const auto route = stream ? calls_.route_for(arguments[2], *stream) : std::nullopt;
    if (!route) return py::none();
    const DispatchTensors given = tensors_of(address_of(arguments[0]), 0, 0, address_of(arguments[1]), route->address);
    const RowWidths widths = plan_.format.widths();
    const auto made = slots.cast<SlotTensors&>().dispatch(calls_.communicator, plan_.along(route->max_recv),
                                                          slot_bytes_for(widths, route->max_recv), route->num_recv,
                                                          given, py::none(), route->number, *stream);
    if (!made) return py::none();
    calls_.count();
    calls_.count_traffic(route->num_sent_away * widths.record_bytes());
    calls_.end();
    return py::make_tuple(made->rows, made->scales);
  }

 private:
  EngineCalls calls_;
  DispatchPlan plan_;
};

class RepeatedCombine {
 public:
  RepeatedCombine(py::handle engine, const CombinePlan& plan, const NewTensor& make_out,
                  const std::optional<NewTensor>& make_weights, const py::object& route_type)
      : calls_(engine, route_type), plan_(plan), make_out_(make_out), make_weights_(make_weights) {}

  // Takes rows, weights, two biases and the handle. Returns the sums of rows and of weights. None: as above.
  py::object call(FastArguments arguments) const {
    const uintptr_t rows = address_of(arguments[0]), weights = address_of(arguments[1]);
    const uintptr_t bias_0 = address_of(arguments[2]), bias_1 = address_of(arguments[3]);
    const py::object slots = calls_.slots();
    const std::optional<cudaStream_t> stream = slots.is_none() ? std::nullopt : calls_.begin();
    const auto route = stream ? calls_.route_for(arguments[4], *stream) : std::nullopt;
    if (!route || (rows | bias_0 | bias_1) % kRowAlignBytes != 0) return py::none();
    if (slot_bytes_for(plan_.widths, route->max_sent) > slots.cast<const SlotTensors&>().slot_bytes())
      return py::none();
    uintptr_t out_at = 0, out_weights_at = 0;
    const py::object out = make_out_.make(&out_at);
    const py::object out_weights = make_weights_ ? make_weights_->make(&out_weights_at) : py::none();
    calls_.communicator.combine(plan_,
                                {pointer<uint8_t>(rows),
                                 route->num_recv,
                                 pointer<float>(weights),
                                 {pointer<uint8_t>(bias_0), pointer<uint8_t>(bias_1)},
                                 pointer<uint8_t>(out_at),
                                 pointer<float>(out_weights_at),
                                 pointer<int32_t>(route->address)},
                                {}, route->number, *stream);
    calls_.count();
    calls_.count_traffic(route->num_from_away * plan_.widths.record_bytes());
    calls_.end();
    return py::make_tuple(out, out_weights);
  }

 private:
  EngineCalls calls_;
  CombinePlan plan_;
  NewTensor make_out_;
  std::optional<NewTensor> make_weights_;
};

}  // namespace

void add_normal_calls(py::module_& module) {
  py::class_<RepeatedDispatch>(module, "RepeatedDispatch")
      .def(py::init<py::handle, const DispatchPlan&, std::optional<int>, int, int64_t, py::object, const py::object&,
                    py::object>(),
           py::arg("engine"), py::arg("plan"), py::arg("bound"), py::arg("max_rows"), py::arg("counts_at"),
           py::arg("grid"), py::arg("route_type"), py::arg("handle_type"))
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
}

}  // namespace hybrid_ep::bindings
