// Dispatches and combines inside a domain. Each is one call from Python: it reads the request, takes a slot, launches,
// and makes the results. The first call of a size takes the same way as any other.
//
// What only Python can do, because all ranks do it together or because it is an error, is a method of the engine:
// growth of memory, faults of earlier calls, comparison of the calls of the ranks.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/cuda/new_tensor.h"
#include "bindings/cuda/ordered_launches.h"
#include "bindings/cuda/route_memory.h"
#include "calls/request.h"
#include "calls/route.h"
#include "calls/slots.h"
#include "runtime/communicator.h"

namespace hybrid_ep::calls {

class Domain {
 public:
  // `engine` is the CudaEngine that owns this object, and `rank` its rank of `num_ranks`. `number`: of its buffer.
  // `device` is its torch.device.
  Domain(pybind11::handle engine, int rank, int num_ranks, int number, Communicator& communicator,
         bindings::OrderedLaunches& launches, bindings::RouteMemory& routes, Slots& slots,
         const pybind11::object& device);

  // Takes a DispatchRequest with a routing. Returns rows, scales, experts (None by expert) and weights that arrived,
  // counts of the local experts, the rank prefix matrix, the Route, and None or, by expert, what a PermuteHandle keeps:
  // the flag of an overflow, a chunk, and the address in it. Counts are a list; with a bound, None or, by expert, a
  // tensor. By expert they include padding.
  pybind11::tuple dispatch(pybind11::handle request);
  // Takes a DispatchRequest of rows alone, along a handle. Returns rows and scales.
  pybind11::tuple dispatch_along(pybind11::handle request);
  // Takes a CombineRequest, and a DispatchHandle or a PermuteHandle. Returns sums of rows, and of weights or None.
  pybind11::tuple combine(pybind11::handle request, pybind11::handle handle);

  // Returns the top-k indices, [num_tokens, num_topk], that a dispatch has copied to its route.
  pybind11::object sent_topk_idx(const Route& route, int num_tokens, int num_topk) const;

  // Take part in a call that this rank refuses: no rank sends, and every rank reports the number of the refusal.
  void refuse_dispatch(int refusal);
  void refuse_combine(int refusal);

 private:
  // A call that has begun. `is_after_fault`: an earlier one has reported a fault, which this one raises at its end.
  struct Begun {
    cudaStream_t stream;
    bool is_after_fault;

    uintptr_t number() const { return reinterpret_cast<uintptr_t>(stream); }
  };
  // A dispatch that has been launched.
  struct Sent {
    SlotLease lease;
    const HostCounts* counts;  // nullptr: the host has not waited for them. Valid until the next call
  };
  // A launched dispatch that makes its route, and what its handle needs.
  struct Routed {
    Begun begun;
    Sent sent;
    bindings::RouteMemory::Piece piece;
    DispatchPlan plan;
    Route route;
    int num_rows;
  };

  // Orders a call after the engine's earlier ones. Throws if one of them has lost a rank.
  Begun begin() const;
  // Must be called after the last use of slots. Throws what an earlier call has reported.
  void end(const Begun& begun) const;
  Routed launch(const DispatchArguments& given);
  // Launches until the slots can hold the rows of every rank.
  Sent send(const DispatchPlan& plan, const DispatchTensors& tensors, int handle, SlotLease lease, cudaStream_t stream);
  Sent send_along(const DispatchPlan& plan, const RowsArgument& rows, const Route& route, const Begun& begun);
  // Sums rows at `tensors`, which lacks what is made here.
  pybind11::tuple sum(const CombineArguments& given, const Begun& begun, CombineTensors tensors,
                      const ExpertTensors& experts);
  void combine_without_rows(const CombinePlan& plan, int handle, cudaStream_t stream);
  // Of the local experts, as a list; None: the host has not waited for them.
  pybind11::object counts_of(const Routed& routed) const;
  // A tensor in the memory of the route, which it keeps.
  pybind11::object part_of_route(const Routed& routed, int64_t offset, std::vector<int64_t> shape,
                                 ElementType type) const;
  pybind11::object rank_prefix(const Routed& routed) const;
  // None where there are no columns.
  pybind11::object new_matrix(int num_rows, int num_columns, bindings::Dtype dtype, uintptr_t* address) const;
  // Makes the further copies of each row, of which there are `num_rows`. Returns rows by expert, and their scales,
  // which `tensors` lacks.
  std::pair<pybind11::object, pybind11::object> duplicate(const RowsArgument& rows, Sent& sent,
                                                          const DispatchPlan& plan, int num_recv, int num_rows,
                                                          int num_sms, DuplicateTensors tensors, const Begun& begun);
  static int num_local(const DispatchPlan& plan);
  // Counts a launch.
  void count() const;
  void count_traffic(int64_t num_bytes) const;

  pybind11::handle engine_;
  int rank_, num_ranks_, number_;
  Communicator& communicator_;
  bindings::OrderedLaunches& launches_;
  bindings::RouteMemory& routes_;
  Slots& slots_;
  pybind11::object traffic_, make_zeros_;
  bindings::TensorDevice device_;
};

}  // namespace hybrid_ep::calls
