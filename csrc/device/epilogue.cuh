// How a persistent kernel ends: every CTA reports, and the last one resets the control block for the next kernel.
#pragma once

#include "device/ptx/memory.cuh"
#include "device/wait.cuh"
#include "layout/control_block.h"

namespace hybrid_ep {

// Collective over the CTA; `ok` is false if a wait was given up. Returns true in the last CTA of the grid, which then
// sees the writes of all CTAs. A release at system scope by that CTA publishes them all, because releases are
// cumulative.
__device__ inline bool finish_cta(ControlBlock& own, bool ok) {
  __shared__ bool is_last;
  // NOTE: not __syncthreads_and(ok): where one thread alone uses the result, ptxas 13.0 lets it arrive twice.
  if (!ok) own.failed = 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::add_acq_rel_gpu(&own.finished_ctas, 1) == gridDim.x - 1;
  }
  __syncthreads();
  return is_last;
}

// Collective over the last CTA: advances the epoch. A failed call advances it too, so that ranks stay in step.
__device__ inline void end_kernel(const Waiter& waiter, ControlBlock& own, uint32_t& epoch_counter, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Both are loaded at once, because the kernel ends when they have come.
  const bool has_failed = own.failed != 0, has_missed = waiter.has_missed();
  if (!has_failed && has_missed) waiter.withdraw_missed();
  own.arrived_ctas = own.routed_ctas = 0;
  own.started_ctas = 0;
  own.finished_ctas = 0;
  own.sent_items = own.summed_tokens = 0;
  own.failed = 0;
  own.refused = 0;
  epoch_counter = epoch;
}

}  // namespace hybrid_ep
