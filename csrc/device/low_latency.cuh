// What the low-latency kernels share: where a buffer is, who takes part, and how a kernel ends.
#pragma once

#include "device/wait.cuh"
#include "layout/low_latency_layout.h"

namespace hybrid_ep {

__device__ inline LowLatencyControl& control_of(const LowLatencyDomain& domain, int rank) {
  return *reinterpret_cast<LowLatencyControl*>(domain.region[rank]);
}
__device__ inline LowLatencyChannel& channel_of(const LowLatencyDomain& domain, int rank) {
  return control_of(domain, rank).channels[static_cast<int>(domain.kind)][domain.buffer_idx];
}
__device__ inline uint8_t* buffer_of(const LowLatencyDomain& domain, int rank) {
  return domain.region[rank] + domain.buffer_begin;
}

// Waits until rank r has raised its flag to `epoch`; returns whether it takes part. A rank that does not come is masked
// here, so that kernels which are already queued do not wait for it again; the host decides whether that lasts.
__device__ inline bool wait_for_rank(const LowLatencyDomain& domain, const Waiter& waiter, const uint32_t* flags,
                                     uint32_t epoch, int r, WaitTag tag) {
  int32_t& masked = control_of(domain, domain.rank).masked[r];
  if (*static_cast<volatile int32_t*>(&masked) != 0) return false;
  if (waiter.until_epoch(flags + r, epoch, r, tag)) return true;
  if (r != domain.rank) *static_cast<volatile int32_t*>(&masked) = 1;
  return false;
}

// Collective over the CTA. Makes all its writes, to any GPU, visible to the system, and returns true in the last CTA of
// the grid, which thereby sees the writes of all of them.
__device__ inline bool is_last_cta(LowLatencyProgress& progress) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_acq_rel_system();
    is_last = ptx::add_acq_rel_gpu(&progress.finished_ctas, 1) == gridDim.x * gridDim.y - 1;
    ptx::fence_acq_rel_system();
  }
  __syncthreads();
  return is_last;
}

// Ends the kernel, in its last CTA: whether or not a wait was given up, so that ranks stay in step.
__device__ inline void end_call(LowLatencyProgress& progress, uint32_t epoch) {
  if (threadIdx.x != 0) return;
  progress.finished_ctas = 0;
  progress.epoch = epoch;
}

// Tells every rank that takes part, in the last CTA, that what it had sent has been read.
__device__ inline void give_back_buffer(const LowLatencyDomain& domain, const bool* present, uint32_t epoch) {
  const int r = threadIdx.x;
  if (r < domain.num_ranks && present[r]) {
    ptx::store_release_system(&channel_of(domain, r).free_epoch[domain.rank], epoch);
  }
}

}  // namespace hybrid_ep
