// Raises the flag of each chunk of a combine, or of a copy of experts, once the chunk has arrived.
//
//     sending warps of a CTA: chunk has arrived ─► queue of each ─► one reporting warp ─► chunk_epoch of the source
//
// A release at system scope waits for the wire. One warp of a CTA does it for all, so that sending warps go on.
#pragma once

#include "device/lanes.cuh"
#include "device/ptx/memory.cuh"
#include "kernels/params.h"
#include "layout/control_block.h"

namespace hybrid_ep {
namespace {

constexpr int32_t kLastReport = -1;

__device__ int32_t report_of(int source, int chunk) {
  static_assert(kMaxChunksOfSource <= 1 << 16 && kMaxRanks < 1 << 15);
  return source << 16 | chunk;
}

// One thread of a sending warp pushes each chunk that has arrived, and at its end kLastReport.
//
// NOTE: queues are in global memory. L1 is as near as shared memory, and in shared memory racecheck accepts no order
// between warps but that of barriers.
__device__ void push_report(ReportQueue& queue, int32_t report) {
  const uint32_t position = queue.num_pushed;
  // The reporting warp waits only for warps of its CTA, so it needs no deadline.
  while (position - ptx::load_acquire_cta(&queue.num_taken) == ReportQueue::kCapacity) {
  }
  queue.reports[position % ReportQueue::kCapacity] = report;
  ptx::store_release_cta(&queue.num_pushed, position + 1);
}

// One thread of the reporting warp, as take_report().
__device__ bool has_report(const ReportQueue& queue) {
  return ptx::load_acquire_cta(&queue.num_pushed) != queue.num_taken;
}

__device__ int32_t take_report(ReportQueue& queue) {
  const uint32_t position = queue.num_taken;
  const int32_t report = queue.reports[position % ReportQueue::kCapacity];
  ptx::store_release_cta(&queue.num_taken, position + 1);
  return report;
}

// Raises the flag of a chunk in the arena of its source. One thread.
__device__ void raise_flag(const Domain& domain, uint32_t epoch, int32_t report) {
  ptx::store_release_system(&domain.control[report >> 16]->chunk_epoch[domain.rank][report & 0xffff], epoch);
}

// Calls raise(report) with what kNumQueues sending warps of a CTA have pushed, until each has pushed kLastReport.
// Collective over a warp; one thread calls `raise` for each queue.
template <int kNumQueues, typename Raise>
__device__ void report_chunks(ReportQueue* queues, Raise&& raise) {
  const int lane = threadIdx.x % 32;
  static_assert(kNumQueues <= kMaxReportQueues);
  bool is_open = lane < kNumQueues;
  while (__ballot_sync(kAllLanes, is_open) != 0) {
    if (is_open && has_report(queues[lane])) {
      const int32_t report = take_report(queues[lane]);
      is_open = report != kLastReport;
      if (is_open) raise(report);
    }
    __syncwarp();
  }
}

// Raises the flags of all chunks at all other ranks, where calls differ. Then ranks may have other routes, and wait for
// other chunks than this rank has. By all sending warps: this is the `warp`-th of num_warps.
__device__ void raise_all_flags(const Domain& domain, uint32_t epoch, int warp, int num_warps) {
  const int num_flags = domain.num_ranks * kMaxChunksOfSource;
  for (int i = warp * 32 + threadIdx.x % 32; i < num_flags; i += num_warps * 32) {
    const int r = i / kMaxChunksOfSource;
    if (r == domain.rank) continue;
    ptx::store_relaxed_system(&domain.control[r]->chunk_epoch[domain.rank][i % kMaxChunksOfSource], epoch);
  }
}

}  // namespace
}  // namespace hybrid_ep
