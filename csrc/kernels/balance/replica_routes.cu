// Where the weights of replicas go, for all tensors of the experts, as hybrid_ep/buffers/expert_moves.py has it in
// torch: equal in every number.
//
//   mapping ──► this rank's experts that have a replica ──► sent, columns
//   mapping ──► order of the experts in this rank's slots ──► arrived, homes
//   mapping ──► checksum, which a dispatch compares
//
// One CTA. An expert arrives once at a rank, by home rank and number: slots of one expert share it.
#include <cuda_runtime.h>

#include "device/lanes.cuh"
#include "device/replica_mapping.cuh"
#include "kernels/balance/balance.h"
#include "kernels/launch.h"
#include "layout/limits.h"

namespace hybrid_ep {
namespace {

constexpr int kThreads = 512;

struct Replicas {
  int32_t position[kMaxExperts];  // of each expert of this rank among those that are sent; −1 without a replica
  uint8_t is_first[kMaxExperts];  // of each slot of this rank: no earlier one has the same expert
  uint32_t checksum;
};

__global__ void __launch_bounds__(kThreads) replica_routes_kernel(const __grid_constant__ ReplicaRoutesParams params) {
  __shared__ Replicas replicas;
  const int num_local = params.num_local, num_slots = params.num_slots;
  const int num_entries = params.num_mapped_ranks * num_slots;
  const int64_t first_expert = static_cast<int64_t>(params.rank - params.first_rank) * num_local;
  const int64_t* mine = params.mapping + static_cast<int64_t>(params.rank - params.first_rank) * num_slots;

  for (int i = threadIdx.x; i < num_local; i += kThreads) replicas.position[i] = -1;
  for (int i = threadIdx.x; i < params.num_sent * params.num_ranks; i += kThreads) params.columns[i] = -1;
  for (int i = threadIdx.x; i < num_slots; i += kThreads) {
    bool is_first = mine[i] >= 0;
    for (int before = 0; before < i; ++before) is_first = is_first && mine[before] != mine[i];
    replicas.is_first[i] = is_first;
  }
  if (threadIdx.x == 0) replicas.checksum = 0;
  __syncthreads();
  uint32_t sum = 0;
  for (int i = threadIdx.x; i < num_entries; i += kThreads) {
    const int64_t local = params.mapping[i] - first_expert;
    if (local >= 0 && local < num_local) replicas.position[local] = 0;
    sum += checksum_part(i, params.mapping[i]);
  }
  sum = __reduce_add_sync(kAllLanes, sum);
  if (threadIdx.x % 32 == 0) atomicAdd(&replicas.checksum, sum);
  for (int i = threadIdx.x; i < num_slots; i += kThreads) {
    int before = 0;
    for (int other = 0; other < num_slots; ++other) before += replicas.is_first[other] && mine[other] < mine[i];
    params.arrived[i] = mine[i] < 0 ? -1 : before;
    params.homes[i] = mine[i] < 0 ? -1 : params.first_rank + mine[i] / num_local;
  }
  __syncthreads();

  if (threadIdx.x == 0) *params.checksum = replicas.checksum >> 1;

  // Experts that have a replica, ascending.
  if (threadIdx.x < 32) {
    int num_sent = 0;
    for (int first = 0; first < num_local; first += 32) {
      const int expert = first + threadIdx.x;
      const bool is_sent = expert < num_local && replicas.position[expert] == 0;
      const unsigned sent = __ballot_sync(kAllLanes, is_sent);
      if (is_sent) {
        const int position = num_sent + __popc(sent & ((1u << threadIdx.x) - 1));
        replicas.position[expert] = position;
        params.sent[position] = expert;
      }
      num_sent += __popc(sent);
    }
    for (int i = num_sent + threadIdx.x; i < params.num_sent; i += 32) params.sent[i] = -1;
  }
  __syncthreads();

  for (int i = threadIdx.x; i < num_entries; i += kThreads) {
    const int64_t local = params.mapping[i] - first_expert;
    if (local < 0 || local >= num_local) continue;
    const int rank = params.first_rank + i / num_slots;
    params.columns[static_cast<int64_t>(replicas.position[local]) * params.num_ranks + rank] = rank;
  }
}

}  // namespace

void launch_replica_routes(const ReplicaRoutesParams& params, cudaStream_t stream) {
  launch_kernel(LaunchKind::kPlain, replica_routes_kernel, params, 1, kThreads, 0, stream);
}

}  // namespace hybrid_ep
