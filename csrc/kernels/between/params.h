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

struct DispatchBetweenParams : CommonDispatchParams {
  BetweenDomain between;
  bool makes_route;
  int num_mapped_ranks;  // ranks that have one mapping, consecutive: those of a domain, or all
  RecordLayout record;
  int32_t call[kNumDispatchFields];  // what all ranks must have alike, but for the checksum of a mapping
  FaultKind refusal;                 // what the host has found wrong with the arguments; then no rank sends
  int refused_value;
  int slot_idx, held_capacity;
  int32_t* route;
  BetweenRoute parts;
};

struct CombineBetweenParams : CommonCombineParams {
  BetweenDomain between;
  // Scratch where a domain has several ranks: sums over them.
  uint8_t* own_sums;   // [T, H] bf16, by index among the tokens that have rows in this domain
  float* own_weights;  // [T, W] or nullptr, by the same index
  int num_topk;
  RecordLayout record;
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
