// Replicas of experts: which a token goes to, the plan of a micro-batch, and its copies. Legend: T tokens, K top-k, E
// experts, R ranks, D domains, Rd = R/D, LE = E/R, B spare slots of a rank, X replicas of an expert at most, P slots of
// all ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace hybrid_ep {

struct MapTopkParams {
  const int64_t* topk_idx;     // [T × K] logical expert or −1
  const int64_t* replicas;     // [E, X] slots of an expert, −1 behind
  const int64_t* num_choices;  // [E]
  int64_t* slots;              // [T × K]
  int64_t num_copies;          // T × K
  int num_topk, num_experts, max_replicas, num_slots;
  uint32_t rank_turn;  // of this rank, in the order of turns
};

struct PlanParams {
  const int64_t* counts;  // [R, E] copies that each rank sends to each expert; fewer than 2³¹ in a domain
  int64_t* spare;         // [R, B] the expert in each spare slot, or −1
  int64_t* quota;         // [E, Rd] copies of each expert that each rank of its domain gets
  int64_t* loads;         // [R] copies of each rank
  int num_ranks, num_experts, ranks_per_domain, num_spare;
  double tolerance_factor;  // 1 + ε
};

struct MapOnlineParams {
  const int64_t* counts;    // [R, E], as planned with
  const int64_t* spare;     // [R, B] of the plan
  const int64_t* quota;     // [E, Rd] of the plan
  const int64_t* topk_idx;  // [T × K] expert or −1, those that the row of this rank has counted
  int64_t* slots;           // [T × K]
  int64_t num_copies;       // T × K
  int num_ranks, num_experts, ranks_per_domain, num_spare, rank;  // at most kMaxExperts
};

// Dynamic shared memory of the plan, in bytes.
int64_t plan_shared_bytes(const PlanParams& params);

// Each launches on the stream and returns; the caller has set the device. Throws CudaError if the launch is refused.
void launch_map_topk(const MapTopkParams& params, cudaStream_t stream);
void launch_plan(const PlanParams& params, cudaStream_t stream);
void launch_map_online(const MapOnlineParams& params, cudaStream_t stream);

}  // namespace hybrid_ep
