// What the bindings of low-latency calls share: the halves of calls, and calls as a whole.
#pragma once

#include "bindings/cuda/bindings.h"
#include "runtime/low_latency.h"

namespace hybrid_ep::bindings {

inline TokensOut tokens_out(uintptr_t rows, uintptr_t topk_idx, int num_tokens, uintptr_t global_scale,
                            uint32_t counter) {
  return {pointer<uint8_t>(rows), pointer<int64_t>(topk_idx), num_tokens, pointer<float>(global_scale), counter};
}

inline TokensIn tokens_in(uintptr_t rows, uintptr_t scales, uintptr_t wait_stats) {
  return {pointer<uint8_t>(rows), pointer<uint32_t>(scales), pointer<int64_t>(wait_stats)};
}

inline RowsHome rows_home(uintptr_t rows, uintptr_t results, uintptr_t topk_weights, int num_tokens, bool use_logfmt) {
  return {pointer<uint8_t>(rows), pointer<int32_t>(results), pointer<float>(topk_weights), num_tokens, use_logfmt};
}

inline RowsToSum rows_to_sum(uintptr_t results, uintptr_t topk_idx, uintptr_t topk_weights, uintptr_t out,
                             int num_tokens, bool use_logfmt) {
  return {pointer<int32_t>(results),
          pointer<int64_t>(topk_idx),
          pointer<float>(topk_weights),
          pointer<uint8_t>(out),
          num_tokens,
          use_logfmt};
}

// The rows that each local expert has received, [LE] int32, of a dispatch whose results are at `address`. The tensor
// keeps `memory`.
pybind11::object make_counts(const LowLatencyPlan& plan, const pybind11::object& memory, uintptr_t address, int device);

void add_low_latency_calls(pybind11::module_& module);

}  // namespace hybrid_ep::bindings
