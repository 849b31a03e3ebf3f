// How the ranks of a combine, or of a copy of experts, tell each other that their arenas may be written, and compare
// what they are about to do.
#pragma once

#include "device/lanes.cuh"
#include "device/wait.cuh"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

// Publishes to all ranks that this rank's kernel runs, so that no earlier one reads the arena's first slot. Earlier
// kernels have ended, so the words need no release. `call` are the words of ControlBlock::ready. By the threads of one
// CTA.
__device__ void publish_ready(const Domain& domain, const uint32_t (&call)[kNumReadyWords], uint32_t epoch) {
  for (int i = threadIdx.x; i < kNumReadyWords * domain.num_ranks; i += blockDim.x) {
    const int word = i % kNumReadyWords;
    ptx::store_relaxed_system(&domain.control[i / kNumReadyWords]->ready[epoch % 2][domain.rank][word],
                              static_cast<uint64_t>(call[word]) << 32 | epoch);
  }
}

// A word of a rank that is ready.
__device__ uint32_t ready_word(const Domain& domain, uint32_t epoch, int r, int word) {
  return static_cast<uint32_t>(domain.control[domain.rank]->ready[epoch % 2][r][word] >> 32);
}

// Reports a call that differs from this rank's, once all words have come. Collective over a warp.
__device__ void report_other_calls(const Domain& domain, KernelName kernel, const uint32_t (&call)[kNumReadyWords],
                                   uint32_t epoch) {
  for (int r = threadIdx.x % 32; r < domain.num_ranks; r += 32) {
    const uint64_t* words = domain.control[domain.rank]->ready[epoch % 2][r];
    const uint64_t first = ptx::load_relaxed_system(words), second = ptx::load_relaxed_system(words + 1);
    // A rank that has given this call up has begun others, or none.
    if (static_cast<uint32_t>(first) != epoch || static_cast<uint32_t>(second) != epoch) continue;
    const uint32_t theirs[] = {static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second >> 32)};
    if (theirs[0] == call[0] && theirs[1] == call[1]) continue;
    report_other_ready(domain.fault, kernel, domain.rank, r, call, theirs);
  }
}

// Waits until the arenas of all ranks may be written. Collective over a warp. If ranks' calls differ, *is_same is false
// and one warp reports it. Returns false if a rank has not come.
__device__ bool wait_until_ready(const Domain& domain, KernelName kernel, const uint32_t (&call)[kNumReadyWords],
                                 const Waiter& waiter, uint32_t epoch, bool reports, bool* is_same) {
  const ControlBlock& own = *domain.control[domain.rank];
  bool ok = true;
  *is_same = true;
  for (int i = threadIdx.x % 32; i < kNumReadyWords * domain.num_ranks; i += 32) {
    const int r = i / kNumReadyWords, word = i % kNumReadyWords;
    if (r == domain.rank) continue;
    const uint32_t mine = call[word];
    uint32_t theirs = mine;  // also of a rank that has given this call up and begun others
    ok &= waiter.until_epoch(&own.ready[epoch % 2][r][word], epoch, r, WaitTag::kReady, &theirs);
    *is_same &= theirs == mine;
  }
  *is_same = __all_sync(kAllLanes, *is_same);
  if (reports && !*is_same) report_other_calls(domain, kernel, call, epoch);
  return __all_sync(kAllLanes, ok);
}

}  // namespace
}  // namespace hybrid_ep
