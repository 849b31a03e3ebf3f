// What calls that repeat an earlier one use of their engine. Each is one call of C++, which takes a slot or memory for
// the results, launches, and makes the tensors. It returns None where it has done nothing, because the call needs
// anything else. Python makes it then: hybrid_ep/engine/cuda/repeated.py.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/fast_call.h"
#include "bindings/cuda/named_tuple.h"
#include "bindings/cuda/ordered_launches.h"
#include "bindings/cuda/route_memory.h"
#include "bindings/cuda/tensors.h"
#include "common/capture.h"

namespace hybrid_ep::bindings {

// The fields of a Route in hybrid_ep/engine/cuda/route.py that calls read.
struct RouteFields {
  explicit RouteFields(pybind11::handle route)
      : address(PyLong_AsSize_t(item(route, 1).ptr())),
        num_recv(integer(route, 3)),
        max_recv(integer(route, 4)),
        max_sent(integer(route, 5)),
        num_sent_away(integer(route, 6)),
        num_from_away(integer(route, 7)),
        num_records(integer(route, 8)),
        number(integer(route, 9)),
        stream(PyLong_AsSize_t(item(route, 10).ptr())) {
    if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  }

  uintptr_t address;
  int num_recv, max_recv, max_sent, num_sent_away, num_from_away, num_records, number;
  uintptr_t stream;

 private:
  static pybind11::handle item(pybind11::handle route, int i) { return PyTuple_GET_ITEM(route.ptr(), i); }
  static int integer(pybind11::handle route, int i) { return static_cast<int>(PyLong_AsLong(item(route, i).ptr())); }
};

// What a dispatch without a bound waits for, of HostCounts.
struct WaitedCounts {
  int num_recv, num_permuted, num_sent_away, num_kept, max_recv, max_sent, max_rows;
  std::vector<int32_t> num_tokens_per_expert;  // of the local experts
};

// What calls use of their engine, a CudaEngine, which outlives them.
class EngineCalls {
 public:
  // `route_type` is Route.
  EngineCalls(pybind11::handle engine, const pybind11::object& route_type)
      : communicator(engine.attr("_communicator").cast<Communicator&>()),
        routes(engine.attr("_routes").cast<RouteMemory&>()),
        engine_(engine),
        traffic_(engine.attr("traffic")),
        route_type_(route_type),
        launches_(engine.attr("_order").cast<OrderedLaunches&>()),
        number_(engine.attr("number").cast<int>()),
        device_(engine.attr("_index").cast<int>()) {
    require_route(route_type_);
  }

  Communicator& communicator;
  RouteMemory& routes;

  // Must live as long as a call. Where another thread is in one, Python refuses the call.
  OneCall begin_call() const { return launches_.begin_call(); }
  // The SlotTensors for a call that can be one call of C++; None: it cannot, for there is more to be done. A call keeps
  // them, because the engine may get others while it waits.
  pybind11::object slots() const { return engine_.attr(slots_now_); }
  // The stream of a call, after the engine's earlier launches; nullopt: a kernel has reported a fault, or the stream is
  // being captured.
  std::optional<cudaStream_t> begin() const {
    if (communicator.has_fault()) return std::nullopt;
    const cudaStream_t stream = launches_.current();
    if (capture_of(stream).id != 0) return std::nullopt;
    launches_.order().begin(stream);
    return stream;
  }
  // What a dispatch that makes its route is launched with.
  struct BegunDispatch {
    pybind11::object slots;
    DispatchTensors given;
    RouteMemory::Piece piece;  // for its route
    cudaStream_t stream;
  };

  // Of rows, scales, top-k indices and weights; nullopt: the call cannot be one call of C++.
  std::optional<BegunDispatch> begin_dispatch(const DispatchPlan& plan, FastArguments arguments) const {
    pybind11::object slots_now = slots();
    const std::optional<cudaStream_t> stream = slots_now.is_none() ? std::nullopt : begin();
    if (!stream) return std::nullopt;
    auto piece = routes.take(plan.route.num_ints, reinterpret_cast<uintptr_t>(*stream), /*alone=*/false);
    const DispatchTensors given = tensors_of(address_of(arguments[0]), address_of(arguments[2]),
                                             address_of(arguments[3]), address_of(arguments[1]), piece.address);
    return BegunDispatch{std::move(slots_now), given, std::move(piece), *stream};
  }
  // The route of a handle; nullopt: an engine of another kind has made it, or its memory belongs to another stream.
  std::optional<RouteFields> route_for(pybind11::handle handle, cudaStream_t stream) const {
    const pybind11::handle state = PyTuple_GET_ITEM(handle.ptr(), kStateOfHandle);
    if (!is_of(state, route_type_)) return std::nullopt;
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
  // Waits for the counts of a launch; counts what is sent. nullopt: slots were too small, and no rank has sent. Then
  // all ranks have grown theirs, each after this one launch, and the call is still to be made.
  std::optional<WaitedCounts> wait(const DispatchPlan& plan, uint32_t counts_epoch, cudaStream_t stream) const {
    const HostCounts* const found = wait_for_counts(communicator, counts_epoch, stream);
    if (found == nullptr) raise_failed();
    if (found->status == kNeedsCapacity) {
      engine_.attr("_arena").attr("ensure")(plan.slot_bytes_for(found->max_rows));
      return std::nullopt;
    }
    count_traffic(found->num_sent_away * plan.format.widths().record_bytes());
    const int32_t* const counts = found->num_tokens_per_expert;
    return WaitedCounts{found->num_recv,      found->num_permuted,
                        found->num_sent_away, found->num_kept,
                        found->max_recv,      found->max_sent,
                        found->max_rows,      {counts, counts + plan.num_experts / plan.num_ranks}};
  }
  // Must be called after the last use of the arena.
  void end() const { launches_.order().end(); }

  pybind11::object make_route(const RouteMemory::Piece& piece, int64_t counts_at, int num_recv, int max_recv,
                              int max_sent, int num_sent_away, int num_from_away, int num_records, int number,
                              cudaStream_t stream) const {
    return make_named(route_type_, piece.chunk, piece.address, counts_at, num_recv, max_recv, max_sent, num_sent_away,
                      num_from_away, num_records, number, reinterpret_cast<uintptr_t>(stream));
  }
  // The copy of the caller's top-k indices that a dispatch writes to its route.
  pybind11::object topk_of(const RouteMemory::Piece& piece, const DispatchPlan& plan) const {
    const uintptr_t address = piece.address + plan.route.topk_idx * sizeof(int32_t);
    return make_tensor(address, {plan.num_tokens, plan.num_topk}, {kInt, 64}, device_, [memory = piece.memory] {});
  }
  // `communicator` as Python has it.
  pybind11::object own_communicator() const { return engine_.attr("_communicator"); }
  static bool is_of(pybind11::handle object, const pybind11::object& type) {
    return Py_IS_TYPE(object.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr()));
  }

 private:
  [[noreturn]] void raise_failed() const {
    engine_.attr("_raise_failed")();
    throw std::logic_error("CudaEngine._raise_failed has returned");
  }

  static constexpr int kStateOfHandle = 6;  // in a DispatchHandle

  pybind11::handle engine_;
  pybind11::object traffic_, route_type_;
  OrderedLaunches& launches_;
  int number_, device_;
  pybind11::str num_calls_ = "num_calls", within_ = "within_domain", slots_now_ = "slots_now";
};

}  // namespace hybrid_ep::bindings
