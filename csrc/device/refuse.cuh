// Refusals: faults of a rank's own arguments. A rank publishes its refusal with its counts. Then no rank sends, and all
// report the same fault.
#pragma once

#include <cuda_runtime.h>

#include "device/wait.cuh"
#include "layout/limits.h"

namespace hybrid_ep {

// Refuses the call because of an expert index that is out of range.
__device__ inline void refuse_expert(ControlBlock& own, int64_t expert) {
  const int64_t value = max(static_cast<int64_t>(INT32_MIN), min(static_cast<int64_t>(INT32_MAX), expert));
  atomicCAS(&own.refused, 0ull,
            static_cast<unsigned long long>(FaultKind::kBadExpert) << 32 | static_cast<uint32_t>(value));
}

// The kernel's refusal if there is one, else the host's (`kind` and `value`).
struct Refusal {
  int kind, value;
};
__device__ inline Refusal find_refusal(const ControlBlock& own, int kind, int value) {
  const unsigned long long refused = __ldcg(&own.refused);
  if (refused == 0) return {kind, value};
  return {static_cast<int>(refused >> 32), static_cast<int>(refused)};
}

// Reports the refusal of rank `peer`. `common_bound`: of a bounded call. `max_tokens`: the most tokens of a rank.
__device__ inline void report_refusal(FaultRecord* fault, KernelName kernel, FaultKind kind, int rank, int peer,
                                      int num_experts, int common_bound, int max_tokens, int value) {
  const int allowed = kind == FaultKind::kBadExpert  ? num_experts
                      : kind == FaultKind::kBadBound ? common_bound
                                                     : max_tokens;
  report_fault(fault, kind, kernel, WaitTag::kCounts, rank, peer, allowed, value);
}

}  // namespace hybrid_ep
