// How a persistent kernel ends: every CTA reports, the last one tidies up the control block for the next kernel.
#pragma once

#include "device/ptx/memory.cuh"
#include "layout/control_block.h"

namespace hybrid_ep {

// Collective over the CTA; `ok` is false where a wait was given up. Makes all its writes, to any GPU, visible to the
// system, and returns true in the last CTA of the grid, which thereby sees the writes of all of them.
__device__ inline bool finish_cta(ControlBlock& own, bool ok) {
  __shared__ bool is_last;
  ok = __syncthreads_and(ok);
  if (threadIdx.x == 0) {
    if (!ok) own.failed = 1;
    ptx::fence_acq_rel_system();
    is_last = ptx::add_acq_rel_gpu(&own.finished_ctas, 1) == gridDim.x - 1;
  }
  __syncthreads();
  return is_last;
}

// Collective over the last CTA: moves the epoch on, whether or not the call succeeded, so that ranks stay in step.
__device__ inline void end_kernel(ControlBlock& own, uint32_t& epoch_counter, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  own.arrived_ctas = own.placed_ctas = 0;
  own.started_ctas = 0;
  own.finished_ctas = 0;
  own.sent_items = own.summed_tokens = 0;
  own.failed = 0;
  own.refused = 0;
  epoch_counter = epoch;
}

}  // namespace hybrid_ep
