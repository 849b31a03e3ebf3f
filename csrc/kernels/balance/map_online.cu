// Copies to slots along the plan of a micro-batch, as hybrid_ep/balance/online.py has it in torch: equal in every
// number.
//
// Each CTA takes consecutive copies. It counts the copies of each expert that come before its own, and so needs no
// other CTA. An expert's copies go, in their order, to the ranks of its domain, in the order of these.
//
//   topk_idx ── counted before this CTA ──► how many of its expert a copy has before it ── quotas ──► rank ──► slot
#include <cuda_runtime.h>

#include <algorithm>

#include "device/lanes.cuh"
#include "kernels/balance/balance.h"
#include "kernels/launch.h"
#include "layout/limits.h"

namespace hybrid_ep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxMapCtas = 128;  // each reads all copies before its own
constexpr int kLoadsAtOnce = 4;

// The copies of each expert. Those of this rank that do not stay are `begin` … `end` of all such copies, by rank.
struct Copies {
  int32_t before[kMaxExperts];  // of this rank, that come before those at hand
  int32_t begin[kMaxExperts];
  int32_t end[kMaxExperts];
};

// Copies that rank `member` of the expert's domain keeps on itself.
__device__ int copies_kept(const MapOnlineParams& params, int expert, int member) {
  const int num_local = params.num_experts / params.num_ranks;
  const int first_rank = expert / num_local / params.ranks_per_domain * params.ranks_per_domain;
  const int64_t sent = params.counts[static_cast<int64_t>(first_rank + member) * params.num_experts + expert];
  return static_cast<int>(min(sent, params.quota[static_cast<int64_t>(expert) * params.ranks_per_domain + member]));
}

// The rank within the expert's domain that gets the copy which has `before` of this rank's before it.
__device__ int member_of(const MapOnlineParams& params, int expert, int before, int begin, int end) {
  const int num_local = params.num_experts / params.num_ranks;
  const int first_rank = expert / num_local / params.ranks_per_domain * params.ranks_per_domain;
  const int64_t* quota = params.quota + static_cast<int64_t>(expert) * params.ranks_per_domain;
  int left = 0, upto = 0, member = 0;
#pragma unroll 4
  for (int i = 0; i < params.ranks_per_domain; ++i) {
    const int kept = copies_kept(params, expert, i);
    const int from = left;
    left += static_cast<int>(quota[i]) - kept;  // for copies of other ranks
    upto += max(min(end, left) - max(begin, from), 0) + (first_rank + i == params.rank ? kept : 0);
    member += before >= upto;
  }
  return min(member, params.ranks_per_domain - 1);
}

// Slot of an expert on a rank of its domain; 0 where it has none.
__device__ int64_t slot_on(const MapOnlineParams& params, int expert, int member) {
  const int num_local = params.num_experts / params.num_ranks, num_spare = params.num_spare;
  const int home = expert / num_local;
  const int rank = home / params.ranks_per_domain * params.ranks_per_domain + member;
  int slot = rank == home ? expert % num_local : 0;
  for (int i = 0; rank != home && i < num_spare; ++i) {
    if (params.spare[static_cast<int64_t>(rank) * num_spare + i] == expert) slot = num_local + i;
  }
  return static_cast<int64_t>(rank) * (num_local + num_spare) + slot;
}

__global__ void __launch_bounds__(kThreads) map_online_kernel(const __grid_constant__ MapOnlineParams params) {
  __shared__ Copies copies;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_experts = params.num_experts;
  const int num_local = num_experts / params.num_ranks;
  const int64_t per_cta = (params.num_copies + gridDim.x * kThreads - 1) / (gridDim.x * kThreads) * kThreads;
  const int64_t first = min(blockIdx.x * per_cta, params.num_copies);
  const int64_t last = min(first + per_cta, params.num_copies);

  for (int expert = threadIdx.x; expert < num_experts; expert += kThreads) {
    const int domain = expert / num_local / params.ranks_per_domain;
    int begin = 0, end = 0;
    for (int rank = 0; rank <= params.rank; ++rank) {
      begin = end;
      end += static_cast<int>(params.counts[static_cast<int64_t>(rank) * num_experts + expert]);
      if (rank / params.ranks_per_domain == domain) {
        end -= copies_kept(params, expert, rank % params.ranks_per_domain);
      }
    }
    copies.before[expert] = 0;
    copies.begin[expert] = begin;
    copies.end[expert] = end;
  }
  __syncthreads();
  for (int64_t base = threadIdx.x; base < first; base += kLoadsAtOnce * kThreads) {
    int64_t experts[kLoadsAtOnce];
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      experts[i] = base + i * kThreads < first ? params.topk_idx[base + i * kThreads] : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      if (experts[i] >= 0 && experts[i] < num_experts) atomicAdd(&copies.before[experts[i]], 1);
    }
  }
  __syncthreads();

  for (int64_t base = first; base < last; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    const int64_t given = i < last ? params.topk_idx[i] : -1;
    const bool is_expert = given >= 0 && given < num_experts;
    const int expert = is_expert ? static_cast<int>(given) : -1;
    const unsigned mates = __match_any_sync(kAllLanes, expert);
    const int mates_before = __popc(mates & ((1u << lane) - 1));
    int before = 0;
    for (int turn = 0; turn < kWarps; ++turn) {
      if (turn == warp) {
        if (is_expert) before = copies.before[expert] + mates_before;
        __syncwarp();
        if (is_expert && mates_before == 0) copies.before[expert] += __popc(mates);
      }
      __syncthreads();
    }
    if (is_expert) {
      const int member = member_of(params, expert, before, copies.begin[expert], copies.end[expert]);
      params.slots[i] = slot_on(params, expert, member);
    } else if (i < last) {
      // Dispatch reports what is no slot.
      params.slots[i] = given < 0 ? given : given + static_cast<int64_t>(params.num_ranks) * params.num_spare;
    }
  }
}

}  // namespace

void launch_map_online(const MapOnlineParams& params, cudaStream_t stream) {
  if (params.num_copies == 0) return;
  const int64_t num_ctas = std::min<int64_t>((params.num_copies + kThreads - 1) / kThreads, kMaxMapCtas);
  launch_kernel(LaunchKind::kPlain, map_online_kernel, params, static_cast<unsigned>(num_ctas), kThreads, 0, stream);
}

}  // namespace hybrid_ep
