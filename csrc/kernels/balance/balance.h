// Replicas of experts: which a token goes to, the plan of a micro-batch, its copies, and the weights of replicas.
// Legend: T tokens, K top-k, E experts, R ranks, D domains, Rd = R/D, LE = E/R, B spare slots of a rank, X replicas of
// an expert at most, P slots of all ranks, M ranks of a mapping, n experts that a rank sends at most.
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
  const int64_t* topk_idx;  // [T × K] expert or −1; the row of this rank has counted them
  int64_t* slots;           // [T × K]
  int64_t num_copies;       // T × K
  int num_ranks, num_experts, ranks_per_domain, num_spare, rank;  // at most kMaxExperts
};

struct ReplicaRoutesParams {
  const int64_t* mapping;  // [M, B] the expert in each spare slot, counted from those of first_rank, or −1
  int64_t* sent;           // [n] experts of this rank that have a replica, ascending; −1 behind them
  int64_t* columns;        // [n, R] the ranks that get each of them: rank r in column r, or −1
  int64_t* arrived;        // [B] which of the experts that arrive each slot takes, or −1
  int64_t* homes;          // [B] the home rank of the expert in each slot, or −1
  int64_t* checksum;       // [1] of the mapping
  int num_mapped_ranks, num_slots, num_local, num_sent, num_ranks;  // M, B ≤ kMaxExperts, LE ≤ kMaxExperts, n, R
  int rank, first_rank;
};

struct TakeExpertsParams {
  uint8_t* target;
  const uint8_t* source;
  const int64_t* index;                             // [n] item of the source, or −1
  int64_t target_stride, source_stride, num_bytes;  // of an item; multiples of 16 bytes, as both addresses are
  int num_items;                                    // n ≤ 65535
};

// Dynamic shared memory of the plan, in bytes.
int64_t plan_shared_bytes(const PlanParams& params);

// Each launches on the stream and returns; the caller has set the device. Throws CudaError if the launch is refused.
void launch_map_topk(const MapTopkParams& params, cudaStream_t stream);
void launch_plan(const PlanParams& params, cudaStream_t stream);
void launch_map_online(const MapOnlineParams& params, cudaStream_t stream);
void launch_replica_routes(const ReplicaRoutesParams& params, cudaStream_t stream);
void launch_take_experts(const TakeExpertsParams& params, cudaStream_t stream);

}  // namespace hybrid_ep
