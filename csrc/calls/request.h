// The arguments of calls as C++ reads them: the requests of hybrid_ep/engine/calls.py, which say what the fields are.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "calls/route.h"
#include "runtime/plan.h"

namespace hybrid_ep::calls {

constexpr int kBf16 = 0;  // the number of the dtype

// Throws ConfigError for sizes that no kernel takes.
void require_sizes(int64_t num_experts, int64_t hidden, int dtype);

// The size of a dimension of a tensor.
int size_of(pybind11::handle tensor, int dimension);

// The tensor, or a copy where a bulk copy cannot begin. None stays None.
pybind11::object aligned(pybind11::object tensor);

// Rows and scales, each at a multiple of what bulk copies need; copied where the caller's are not.
struct RowsArgument {
  explicit RowsArgument(pybind11::handle rows);  // of a Rows

  pybind11::object data, scales;  // scales: None for bf16
  uintptr_t data_at, scales_at;
  int num_tokens = 0, hidden = 0, dtype = 0;
  int num_scales = 0, scale_dtype = kAbsent;
};

// A DispatchHandle, or a PermuteHandle.
struct HandleArgument {
  explicit HandleArgument(pybind11::handle handle);

  pybind11::object dispatch;  // the DispatchHandle
  Route* route;
  bool is_by_expert;      // for a PermuteHandle, which has what follows
  pybind11::object kept;  // the PermuteState
  uintptr_t kept_at = 0;
  int num_permuted = 0, pad_multiple = 0;
};

// A DispatchRequest with a routing.
struct DispatchArguments {
  DispatchArguments(pybind11::handle request, int rank, int num_ranks);

  DispatchRequest sizes;
  RowsArgument rows;
  pybind11::object topk_idx, topk_weights;  // contiguous
  uintptr_t checksum_at = 0;                // of a mapping of spare slots
  int again = kAbsent;                      // number of the dispatch whose routing is sent again
  int num_expert_sms = 0;
};

// A DispatchRequest of rows alone, along a handle.
struct AlongArguments {
  explicit AlongArguments(pybind11::handle request);

  DispatchRequest sizes;
  RowsArgument rows;
  HandleArgument handle;
  int num_expert_sms = 0;
};

// A CombineRequest with a handle. By expert, rows are of copies, and each has one weight.
struct CombineArguments {
  CombineArguments(pybind11::handle request, pybind11::handle handle);

  CombinePlan plan;
  pybind11::object data, weights, bias[2];  // None where there is none
  int num_rows, hidden;
  HandleArgument handle;
};

}  // namespace hybrid_ep::calls
