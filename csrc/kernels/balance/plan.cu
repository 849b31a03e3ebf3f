// The plan of one micro-batch, as hybrid_ep/balance/online.py has it in torch: equal in every number.
//
// A CTA for each domain. Each of its 32 warps fills the spare slots for another wanted maximum; the best is written.
//
//   counts ── sum over sources ──► home ── 32 maxima ──► moves of each warp ── best ──► spare, quota, loads
//
// A rank that gives copies is above the maximum, so it has received none, and the experts of other ranks do not change.
// So the largest experts of a rank are searched once, and again only after it has given.
#include <cuda_runtime.h>

#include "device/lanes.cuh"
#include "kernels/balance/balance.h"
#include "kernels/launch.h"
#include "layout/limits.h"

namespace hybrid_ep {
namespace {

constexpr int kNumMaxima = 32;
constexpr int kThreads = 32 * kNumMaxima;
static_assert(kNumMaxima == 32);  // one for each lane, too
constexpr uint16_t kNoExpert = 0xffff;
constexpr unsigned kNone = 0xffffffffu;

// What a CTA holds in shared memory. V maxima; experts and ranks of the domain.
struct PlanMemory {
  int32_t* home;    // [V, Rd × LE] copies that are left to the home slots
  int32_t* given;   // [V, Rd, B] copies that go to each spare slot
  int32_t* loads;   // [V, Rd]
  int32_t* top;     // [V, Rd] sum of the largest B experts
  uint16_t* spare;  // [V, Rd, B] the expert in each spare slot, counted in the domain

  static __host__ __device__ int64_t num_bytes(int num_experts, int num_ranks, int num_spare) {
    return static_cast<int64_t>(kNumMaxima) * (4 * (num_experts + 2 * num_ranks) + 6 * num_ranks * num_spare);
  }
  __device__ PlanMemory(int32_t* memory, int num_experts, int num_ranks, int num_spare) {
    home = memory;
    given = home + kNumMaxima * num_experts;
    loads = given + kNumMaxima * num_ranks * num_spare;
    top = loads + kNumMaxima * num_ranks;
    spare = reinterpret_cast<uint16_t*>(top + kNumMaxima * num_ranks);
  }
};

// The lowest of the lanes' `index` where `is_one`, or `end`. Each lane's is its own modulo 32. Collective over the
// warp.
__device__ int lowest_index(bool is_one, int index, int end) {
  for (int first = 0; first < end; first += 32) {
    const unsigned found = __ballot_sync(kAllLanes, is_one && index / 32 == first / 32);
    if (found != 0) return first + __ffs(found) - 1;
  }
  return end;
}

struct Largest {
  unsigned count, expert;
};

// The largest of a rank's experts that comes after `last`, in descending order of counts and then in ascending order;
// its count is 0 where there is none. Collective over the warp.
__device__ Largest next_largest(const int32_t* home, int num_local, Largest last) {
  Largest mine{0, kNone};
  for (unsigned i = threadIdx.x % 32; i < static_cast<unsigned>(num_local); i += 32) {
    const unsigned count = home[i];
    const bool is_after = count < last.count || (count == last.count && (last.expert == kNone || i > last.expert));
    if (is_after && (count > mine.count || mine.expert == kNone)) mine = {count, i};
  }
  const unsigned most = __reduce_max_sync(kAllLanes, mine.expert == kNone ? 0u : mine.count);
  const bool is_it = mine.expert != kNone && mine.count == most;
  const int expert = lowest_index(is_it, static_cast<int>(mine.expert), num_local);
  return {expert == num_local ? 0 : most, expert == num_local ? kNone : static_cast<unsigned>(expert)};
}

__device__ int sum_of_largest(const int32_t* home, int num_local, int width) {
  if (width >= num_local) {
    int sum = 0;
    for (int i = threadIdx.x % 32; i < num_local; i += 32) sum += home[i];
    return __reduce_add_sync(kAllLanes, sum);
  }
  int sum = 0;
  Largest largest{kNone, kNone};
  for (int i = 0; i < width; ++i) {
    largest = next_largest(home, num_local, largest);
    if (largest.count == 0) break;
    sum += static_cast<int>(largest.count);
  }
  return sum;
}

// Fills spare slots for one maximum. Collective over the warp.
__device__ void fill(const PlanParams& params, int32_t* home, int32_t* given, int32_t* loads, int32_t* top,
                     uint16_t* spare, int64_t wanted) {
  const int lane = threadIdx.x % 32, num_ranks = params.ranks_per_domain, num_spare = params.num_spare;
  const int num_local = params.num_experts / params.num_ranks, width = min(num_spare, num_local);
  unsigned filled = 0;  // bit i: rank lane + 32 i
  for (int step = 0; step < num_ranks - 1; ++step) {
    // The emptiest rank that may still take, and the rank above the maximum that can give it most.
    unsigned least = kNone;
    int emptiest = num_ranks;
    for (int rank = lane, i = 0; rank < num_ranks; rank += 32, ++i) {
      const unsigned load = loads[rank];
      if ((filled >> i & 1) == 0 && load < wanted && load < least) {
        least = load;
        emptiest = rank;
      }
    }
    const unsigned fewest = __reduce_min_sync(kAllLanes, least);
    if (fewest == kNone) break;
    const int taker = lowest_index(least == fewest, emptiest, num_ranks);
    const unsigned lacks = static_cast<unsigned>(wanted) - fewest;
    unsigned gain = 0, load_of_giver = 0;
    int giver = num_ranks;
    for (int rank = lane; rank < num_ranks; rank += 32) {
      const unsigned load = loads[rank];
      if (load <= wanted) continue;
      const unsigned can_give = min(static_cast<unsigned>(top[rank]), lacks);
      if (giver == num_ranks || can_give > gain || (can_give == gain && load > load_of_giver)) {
        gain = can_give;
        load_of_giver = load;
        giver = rank;
      }
    }
    const unsigned best_gain = __reduce_max_sync(kAllLanes, gain);
    const unsigned best_load = __reduce_max_sync(kAllLanes, gain == best_gain ? load_of_giver : 0u);
    const bool is_best = giver < num_ranks && gain == best_gain && load_of_giver == best_load;
    giver = lowest_index(is_best, giver, num_ranks);
    if (giver == num_ranks) break;

    int32_t* home_of_giver = home + giver * num_local;
    Largest largest{kNone, kNone};
    unsigned moved = 0;
    int num_given = 0;
    for (; num_given < width && moved < lacks; ++num_given) {
      largest = next_largest(home_of_giver, num_local, largest);
      if (largest.count == 0) break;
      const unsigned gift = min(lacks - moved, largest.count);
      moved += gift;
      if (lane == 0) {
        spare[taker * num_spare + num_given] = static_cast<uint16_t>(giver * num_local + largest.expert);
        given[taker * num_spare + num_given] = static_cast<int32_t>(gift);
      }
    }
    __syncwarp();
    for (int i = lane; i < num_given; i += 32) {
      home[spare[taker * num_spare + i]] -= given[taker * num_spare + i];
    }
    if (taker % 32 == lane) filled |= 1u << taker / 32;
    const int left = loads[giver] - static_cast<int32_t>(moved);
    __syncwarp();
    if (lane == 0) {
      loads[taker] += static_cast<int32_t>(moved);
      loads[giver] = left;
    }
    if (left > wanted) {  // or else it gives no more
      const int sum = sum_of_largest(home_of_giver, num_local, width);
      if (lane == 0) top[giver] = sum;
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(const __grid_constant__ PlanParams params) {
  extern __shared__ int32_t memory[];
  __shared__ int64_t keys[kNumMaxima];
  const int num_ranks = params.ranks_per_domain, num_spare = params.num_spare;
  const int num_local = params.num_experts / params.num_ranks, num_experts = num_local * num_ranks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_expert = blockIdx.x * num_experts, first_rank = blockIdx.x * num_ranks;
  const PlanMemory all(memory, num_experts, num_ranks, num_spare);
  int32_t* home = all.home + warp * num_experts;
  int32_t* given = all.given + warp * num_ranks * num_spare;
  int32_t* loads = all.loads + warp * num_ranks;
  int32_t* top = all.top + warp * num_ranks;
  uint16_t* spare = all.spare + warp * num_ranks * num_spare;

  // Copies of each expert from all sources.
  for (int i = threadIdx.x; i < num_experts; i += kThreads) {
    int64_t sum = 0;
#pragma unroll 8
    for (int source = 0; source < params.num_ranks; ++source) {
      sum += params.counts[static_cast<int64_t>(source) * params.num_experts + first_expert + i];
    }
    all.home[i] = static_cast<int32_t>(sum);
  }
  for (int i = lane; i < num_ranks * num_spare; i += 32) {
    given[i] = 0;
    spare[i] = kNoExpert;
  }
  __syncthreads();
  // Each warp looks at some ranks for all.
  const int width = min(num_spare, num_local);
  for (int rank = warp; rank < num_ranks; rank += kNumMaxima) {
    const int load = sum_of_largest(all.home + rank * num_local, num_local, num_local);
    const int sum = sum_of_largest(all.home + rank * num_local, num_local, width);
    if (lane == 0) {
      all.loads[rank] = load;
      all.top[rank] = sum;
    }
  }
  __syncthreads();
  if (warp != 0) {
    for (int i = lane; i < num_experts; i += 32) home[i] = all.home[i];
    for (int i = lane; i < num_ranks; i += 32) {
      loads[i] = all.loads[i];
      top[i] = all.top[i];
    }
  }
  __syncthreads();

  int total = 0;
  unsigned most = 0;
  for (int i = lane; i < num_ranks; i += 32) {
    total += loads[i];
    most = max(most, static_cast<unsigned>(loads[i]));
  }
  total = __reduce_add_sync(kAllLanes, total);
  most = __reduce_max_sync(kAllLanes, most);
  int64_t mean = (static_cast<int64_t>(total) + num_ranks - 1) / num_ranks;
  if (params.tolerance_factor != 1.0) {
    mean = static_cast<int64_t>(ceil(static_cast<double>(mean) * params.tolerance_factor));
  }
  // Denser near the mean.
  const int64_t above = static_cast<int64_t>(most) > mean ? static_cast<int64_t>(most) - mean : 0;
  if (num_spare > 0)
    fill(params, home, given, loads, top, spare, mean + above * warp * warp / (kNumMaxima * kNumMaxima));

  // The smallest maximum; of equal ones the plan with the fewest replicas, and of these the first.
  most = 0;
  int used = 0;
  for (int i = lane; i < num_ranks; i += 32) most = max(most, static_cast<unsigned>(loads[i]));
  for (int i = lane; i < num_ranks * num_spare; i += 32) used += spare[i] != kNoExpert;
  most = __reduce_max_sync(kAllLanes, most);
  used = __reduce_add_sync(kAllLanes, used);
  const int64_t reached = static_cast<int64_t>(most) > mean ? static_cast<int64_t>(most) : mean;
  if (lane == 0) keys[warp] = reached * (static_cast<int64_t>(num_ranks) * num_spare + 1) + used;
  __syncthreads();
  int64_t least = keys[lane];
  for (int i = 16; i > 0; i /= 2) least = min(least, __shfl_xor_sync(kAllLanes, least, i));
  const int best = __ffs(__ballot_sync(kAllLanes, keys[lane] == least)) - 1;

  // Quotas of home slots, and zero elsewhere; then those of replicas, which are on other ranks.
  home = all.home + best * num_experts;
  given = all.given + best * num_ranks * num_spare;
  loads = all.loads + best * num_ranks;
  spare = all.spare + best * num_ranks * num_spare;
  int64_t* quota = params.quota + static_cast<int64_t>(first_expert) * num_ranks;
  for (int i = threadIdx.x; i < num_experts * num_ranks; i += kThreads) {
    const int expert = i / num_ranks;
    quota[i] = expert / num_local == i % num_ranks ? home[expert] : 0;
  }
  for (int i = threadIdx.x; i < num_ranks; i += kThreads) params.loads[first_rank + i] = loads[i];
  __syncthreads();
  for (int i = threadIdx.x; i < num_ranks * num_spare; i += kThreads) {
    const bool is_used = spare[i] != kNoExpert;
    params.spare[static_cast<int64_t>(first_rank) * num_spare + i] = is_used ? first_expert + spare[i] : -1;
    if (is_used) quota[spare[i] * num_ranks + i / num_spare] = given[i];
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
