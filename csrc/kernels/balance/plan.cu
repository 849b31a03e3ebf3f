// The plan of one micro-batch, as hybrid_ep/balance/online.py has it in torch: equal in every number.
//
// A CTA for each domain. It fills the spare slots for 32 wanted maxima at once, eight lanes for each. The best plan is
// written.
//
//   counts ── sum over sources ──► sorted by rank ── 32 maxima ──► moves of each ── best ──► spare, quota, loads
//
// Each rank's experts are sorted once, the largest first, and kept as sums up to each of them. So what a rank can give
// is one difference, and what it gives begins at its largest expert. A rank that gives copies is above the maximum. So
// it has received none, and all of its copies are in its list. The last expert that gives may keep some copies: it
// moves back to its place in the order.
#include <cuda_runtime.h>

#include "device/lanes.cuh"
#include "kernels/balance/balance.h"
#include "kernels/launch.h"
#include "layout/limits.h"

namespace hybrid_ep {
namespace {

constexpr int kNumMaxima = 32;
constexpr int kLanes = 8;  // of a maximum
constexpr int kThreads = kNumMaxima * kLanes;
static_assert(kNumMaxima == 32);  // one for each lane of a warp, too

// What a CTA holds in shared memory. V maxima; experts and ranks of the domain. Each rank's list has its experts in
// descending order of copies, then in ascending order; the experts before `head` have given all of their copies.
struct PlanMemory {
  int32_t* counts;   // [E]
  int32_t* upto;     // [V, Rd × LE] copies of the experts up to this one in the list of its rank
  int32_t* given;    // [V, Rd, B] copies that go to each spare slot
  int32_t* loads;    // [V, Rd]
  int32_t* base;     // [V, Rd] copies of the experts before the head, in the terms of `upto`
  int32_t* top;      // [V, Rd] sum of the largest B experts
  uint16_t* expert;  // [V, Rd × LE] by list, counted in the domain
  uint16_t* spare;   // [V, Rd, B] the expert in each spare slot
  uint16_t* head;    // [V, Rd]
  uint16_t* taken;   // [V, Rd] spare slots in use

  static __host__ __device__ int64_t num_bytes(int num_experts, int num_ranks, int num_spare) {
    const int64_t of_maximum = 6 * num_experts + 16 * num_ranks + 6 * static_cast<int64_t>(num_ranks) * num_spare;
    return kNumMaxima * of_maximum + 4 * num_experts;
  }
  __device__ PlanMemory(int32_t* memory, int num_experts, int num_ranks, int num_spare) {
    counts = memory;
    upto = counts + num_experts;
    given = upto + kNumMaxima * num_experts;
    loads = given + kNumMaxima * num_ranks * num_spare;
    base = loads + kNumMaxima * num_ranks;
    top = base + kNumMaxima * num_ranks;
    expert = reinterpret_cast<uint16_t*>(top + kNumMaxima * num_ranks);
    spare = expert + kNumMaxima * num_experts;
    head = spare + kNumMaxima * num_ranks * num_spare;
    taken = head + kNumMaxima * num_ranks;
  }
  // The part of one maximum.
  __device__ PlanMemory of(int maximum, int num_experts, int num_ranks, int num_spare) const {
    PlanMemory one = *this;
    one.upto += maximum * num_experts;
    one.expert += maximum * num_experts;
    one.given += maximum * num_ranks * num_spare;
    one.spare += maximum * num_ranks * num_spare;
    one.loads += maximum * num_ranks;
    one.base += maximum * num_ranks;
    one.top += maximum * num_ranks;
    one.head += maximum * num_ranks;
    one.taken += maximum * num_ranks;
    return one;
  }
};

// Reductions over the lanes of a maximum. Collective over the warp.
template <typename T>
__device__ T least_of(T value) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) value = min(value, __shfl_xor_sync(kAllLanes, value, i));
  return value;
}
template <typename T>
__device__ T most_of(T value) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, i));
  return value;
}
__device__ int sum_of(int value) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) value += __shfl_xor_sync(kAllLanes, value, i);
  return value;
}
__device__ int num_lanes_of(bool is_one) {
  const unsigned lanes = __ballot_sync(kAllLanes, is_one) >> (threadIdx.x % 32 / kLanes * kLanes);
  return __popc(lanes & (kAllLanes >> (32 - kLanes)));
}

// Fills spare slots for one maximum. Collective over the warp, whose maxima take their steps together.
__device__ void fill(const PlanParams& params, const PlanMemory& plan, int64_t wanted) {
  const int lane = threadIdx.x % kLanes, num_ranks = params.ranks_per_domain, num_spare = params.num_spare;
  const int num_local = params.num_experts / params.num_ranks, width = min(num_spare, num_local);
  for (int step = 0; step < num_ranks - 1; ++step) {
    // The emptiest rank that may still take, and the rank above the maximum that can give it most.
    constexpr uint64_t kNone = ~uint64_t{0};
    uint64_t emptiest = kNone;
    for (int rank = lane; rank < num_ranks; rank += kLanes) {
      const unsigned load = plan.loads[rank];
      if (plan.taken[rank] == 0 && load < wanted) emptiest = min(emptiest, uint64_t{load} << 32 | rank);
    }
    emptiest = least_of(emptiest);
    const int taker = static_cast<int>(emptiest & 0xffffffff);
    const int lacks = emptiest == kNone ? 0 : static_cast<int>(wanted - static_cast<int64_t>(emptiest >> 32));
    uint64_t best = 0;
    int giver = num_ranks;
    for (int rank = lane; rank < num_ranks; rank += kLanes) {
      const unsigned load = plan.loads[rank];
      const uint64_t gain = uint64_t(min(plan.top[rank], lacks)) << 32 | load;
      if (load > wanted && gain > best) {
        best = gain;
        giver = rank;
      }
    }
    const uint64_t best_of_all = most_of(best);
    giver = least_of(best == best_of_all ? giver : num_ranks);
    const bool moves = lacks > 0 && giver < num_ranks;
    if (__ballot_sync(kAllLanes, moves) == 0) break;
    if (!moves) giver = 0;

    // The first experts of its list give, until it is enough.
    int32_t* upto = plan.upto + giver * num_local;
    uint16_t* expert = plan.expert + giver * num_local;
    const int head = plan.head[giver], end = min(head + width, num_local), base = plan.base[giver];
    int num_given = 0;
    for (int first = 0; first < width; first += kLanes) {
      const int slot = first + lane, i = head + slot;
      int gift = 0;
      if (moves && i < end) gift = min(upto[i] - base, lacks) - (slot == 0 ? 0 : upto[i - 1] - base);
      if (gift > 0) {
        plan.spare[taker * num_spare + slot] = expert[i];
        plan.given[taker * num_spare + slot] = gift;
      }
      num_given += num_lanes_of(gift > 0);
    }
    // What is left of the last of them goes behind the experts that have more.
    const int last = moves ? head + num_given - 1 : 0;
    const int moved = min(upto[last] - base, lacks), left = moves ? upto[last] - base - moved : 0;
    const uint16_t divided = expert[last];
    int place = last;
    for (int first = last + 1;; first += kLanes) {
      const int i = first + lane;
      int sum = 0;
      uint16_t next = 0;
      bool is_before = false;
      if (left > 0 && i < num_local) {
        sum = upto[i];
        next = expert[i];
        const int count = sum - upto[i - 1];
        is_before = count > left || (count == left && next < divided);
      }
      if (__ballot_sync(kAllLanes, is_before) == 0) break;
      __syncwarp();
      if (is_before) {
        upto[i - 1] = sum - left;
        expert[i - 1] = next;
      }
      place += num_lanes_of(is_before);
    }
    __syncwarp();
    if (moves && lane == 0) {
      const int new_head = left > 0 ? last : last + 1;
      expert[place] = divided;
      plan.head[giver] = static_cast<uint16_t>(new_head);
      plan.base[giver] = base + moved;
      plan.top[giver] = upto[min(new_head + width, num_local) - 1] - (base + moved);
      plan.loads[giver] -= moved;
      plan.loads[taker] += moved;
      plan.taken[taker] = static_cast<uint16_t>(num_given);
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(const __grid_constant__ PlanParams params) {
  extern __shared__ int32_t memory[];
  __shared__ int64_t keys[kNumMaxima];
  const int num_ranks = params.ranks_per_domain, num_spare = params.num_spare;
  const int num_local = params.num_experts / params.num_ranks, num_experts = num_local * num_ranks;
  const int width = min(num_spare, num_local);
  const int maximum = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int first_expert = blockIdx.x * num_experts, first_rank = blockIdx.x * num_ranks;
  const PlanMemory all(memory, num_experts, num_ranks, num_spare);
  PlanMemory plan = all.of(maximum, num_experts, num_ranks, num_spare);

  // Copies of each expert from all sources. Most quotas stay zero.
  for (int i = threadIdx.x; i < num_experts; i += kThreads) {
    int64_t sum = 0;
#pragma unroll 8
    for (int source = 0; source < params.num_ranks; ++source) {
      sum += params.counts[static_cast<int64_t>(source) * params.num_experts + first_expert + i];
    }
    all.counts[i] = static_cast<int32_t>(sum);
  }
  int64_t* quota = params.quota + static_cast<int64_t>(first_expert) * num_ranks;
  for (int i = threadIdx.x; i < num_experts * num_ranks; i += kThreads) quota[i] = 0;
  __syncthreads();
  // Each expert's place in the list of its rank, for every maximum.
  for (int i = threadIdx.x; i < num_experts; i += kThreads) {
    const int first = i / num_local * num_local, count = all.counts[i];
    int place = first, upto = count;
#pragma unroll 8
    for (int other = first; other < first + num_local; ++other) {
      const int its_count = all.counts[other];
      const bool is_before = its_count > count || (its_count == count && other < i);
      place += is_before;
      upto += is_before ? its_count : 0;
    }
#pragma unroll 8
    for (int k = 0; k < kNumMaxima; ++k) {
      all.upto[k * num_experts + place] = upto;
      all.expert[k * num_experts + place] = static_cast<uint16_t>(i);
    }
  }
  __syncthreads();

  int total = 0, most = 0;
  for (int rank = lane; rank < num_ranks; rank += kLanes) {
    const int32_t* upto = plan.upto + rank * num_local;
    const int load = upto[num_local - 1];
    plan.loads[rank] = load;
    plan.top[rank] = width > 0 ? upto[width - 1] : 0;
    plan.base[rank] = 0;
    plan.head[rank] = 0;
    plan.taken[rank] = 0;
    total += load;
    most = max(most, load);
  }
  __syncwarp();
  total = sum_of(total);
  most = most_of(most);
  int64_t mean = (static_cast<int64_t>(total) + num_ranks - 1) / num_ranks;
  if (params.tolerance_factor != 1.0) {
    mean = static_cast<int64_t>(ceil(static_cast<double>(mean) * params.tolerance_factor));
  }
  // Denser near the mean.
  const int64_t above = most > mean ? most - mean : 0;
  if (num_spare > 0) fill(params, plan, mean + above * maximum * maximum / (kNumMaxima * kNumMaxima));

  // The smallest maximum; of equal ones the plan with the fewest replicas, and of these the first.
  most = 0;
  int used = 0;
  for (int rank = lane; rank < num_ranks; rank += kLanes) {
    most = max(most, plan.loads[rank]);
    used += plan.taken[rank];
  }
  most = most_of(most);
  used = sum_of(used);
  const int64_t reached = most > mean ? most : mean;
  if (lane == 0) keys[maximum] = reached * (static_cast<int64_t>(num_ranks) * num_spare + 1) + used;
  __syncthreads();
  const int64_t key = keys[threadIdx.x % 32];
  int64_t least = key;
  for (int i = 16; i > 0; i /= 2) least = min(least, __shfl_xor_sync(kAllLanes, least, i));
  const int best = __ffs(__ballot_sync(kAllLanes, key == least)) - 1;
  plan = all.of(best, num_experts, num_ranks, num_spare);

  // Quotas of home slots, then those of replicas, which are on other ranks.
  for (int i = threadIdx.x; i < num_experts; i += kThreads) {
    const int rank = i / num_local, first = rank * num_local + plan.head[rank];
    if (i < first) continue;
    quota[plan.expert[i] * num_ranks + rank] = plan.upto[i] - (i == first ? plan.base[rank] : plan.upto[i - 1]);
  }
  for (int i = threadIdx.x; i < num_ranks; i += kThreads) params.loads[first_rank + i] = plan.loads[i];
  for (int i = threadIdx.x; i < num_ranks * num_spare; i += kThreads) {
    const int rank = i / num_spare;
    const bool is_used = i - rank * num_spare < plan.taken[rank];
    params.spare[static_cast<int64_t>(first_rank) * num_spare + i] = is_used ? first_expert + plan.spare[i] : -1;
    if (is_used) quota[plan.spare[i] * num_ranks + rank] = plan.given[i];
  }
}

}  // namespace

int64_t plan_shared_bytes(const PlanParams& params) {
  const int num_experts = params.num_experts / params.num_ranks * params.ranks_per_domain;
  return PlanMemory::num_bytes(num_experts, params.ranks_per_domain, params.num_spare);
}

void launch_plan(const PlanParams& params, cudaStream_t stream) {
  allow_shared_memory(plan_kernel);
  launch_kernel(LaunchKind::kPlain, plan_kernel, params, params.num_ranks / params.ranks_per_domain, kThreads,
                static_cast<int>(plan_shared_bytes(params)), stream);
}

}  // namespace hybrid_ep
