// Parameters and launches of the kernels between domains. Legend: T tokens of this rank, K top-k, E experts, H hidden,
// N received rows, W columns of weights, R ranks, D domains, G ranks of a domain.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"
#include "layout/between_layout.h"
#include "transport/link_view.h"

namespace hybrid_ep {

// The grid of all ranks, the ranks of this domain with the memory that a call may use, and the link to the peers.
struct BetweenDomain {
  Grid grid;
  Domain domain;         // rank is the domain rank
  BetweenLayout layout;  // of the control memory behind each ControlBlock
  LinkView link;
};

// Gives each token its index among those that go to each rank and to each domain.
struct IndexTokensParams {
  Grid grid;
  ControlBlock* own;
  const int64_t* topk_idx;  // [T, K]
  int num_tokens, num_topk, num_experts;
  int32_t* route;
  BetweenRoute parts;
};

struct DispatchBetweenParams {
  BetweenDomain between;
  const uint8_t* rows;              // [T, row_bytes]
  const int64_t* topk_idx;          // [T, K]; nullptr: the route is used as it is
  const float* topk_weights;        // [T, K] or nullptr
  const uint32_t* scales;           // [T, num_scales] 4-byte words or nullptr
  const int64_t* mapping_checksum;  // [1] where rows are of experts, else nullptr
  int num_mapped_ranks;             // ranks that have one mapping, consecutive: those of a domain, or all
  int num_tokens, num_topk, num_experts, row_bytes, num_scales;
  bool makes_route, has_weights, is_bound;
  RecordLayout record;
  // Experts that a receiver sees: [range_first + r × range_step, … + range_size) at rank r; others become −1.
  int range_first, range_step, range_size;
  int32_t call[kNumDispatchFields];  // what all ranks must have alike, but for that checksum
  FaultKind refusal;                 // what the host has found wrong with the arguments; then no rank sends
  int refused_value;
  int slot_idx, row_limit, held_capacity;
  int common_bound;  // rows of a bounded call that every slot must hold; kAbsent without a bound
  int max_tokens;    // most tokens that a rank may have; otherwise no rank sends
  SlotLayout slot;
  int32_t* route;
  BetweenRoute parts;
  HostCounts* host_counts;  // nullptr: the host does not wait
  uint32_t counts_epoch;
};

struct CombineBetweenParams {
  BetweenDomain between;
  const uint8_t* rows;     // [N, H] bf16
  const float* weights;    // [N, W] or nullptr
  const uint8_t* bias[2];  // [T, H] bf16 or nullptr
  uint8_t* out;            // [T, H] bf16
  float* out_weights;      // [T, W] or nullptr
  // Scratch where a domain has several ranks: sums over them.
  uint8_t* own_sums;   // [T, H] bf16, by index among the tokens that have rows in this domain
  float* own_weights;  // [T, W] or nullptr, by the same index
  int num_tokens, num_rows, num_topk, num_weights, row_bytes;
  uint32_t call[kNumReadyWords];  // what all ranks must have alike
  int window_bytes;               // of stores on the wire at once; 0: not limited
  RecordLayout record;
  SlotLayout slot;  // `rows` and `weights` of partial rows at the rank that sums them
  const int32_t* route;
  BetweenRoute parts;
};

// The link alone, for the benchmark.
struct StreamChunksParams {
  BetweenDomain between;
  int num_chunks;  // to each peer, and from each
  uint32_t chunk_bytes;
};

// Allow the kernels their shared memory on the current device; once for each.
void prepare_dispatch_between();
void prepare_combine_between();

void launch_index_tokens(const IndexTokensParams& params, cudaStream_t stream);
void launch_dispatch_between(const DispatchBetweenParams& params, int num_sms, cudaStream_t stream);
void launch_stream_chunks(const StreamChunksParams& params, int num_sms, cudaStream_t stream);
void launch_combine_between(const CombineBetweenParams& params, int num_sms, cudaStream_t stream);

}  // namespace hybrid_ep
