// Numbers the tokens for each rank and each domain, in a launch ahead of a dispatch between domains.
//
//     topk_idx ─► a CTA for each rank and each domain ─► index of each token that has an expert there ─► route
//
// Each CTA walks through all tokens: a token's index is the number of tokens before it with the same destination.
// Legend: T tokens, K top-k, E experts, R ranks, D domains.
#include <cuda_runtime.h>

#include "device/lanes.cuh"
#include "device/refuse.cuh"
#include "kernels/between/params.h"
#include "kernels/launch.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kIndexThreads = 512;
constexpr int kIndexWarps = kIndexThreads / 32;

// Number of threads before this one for which `value` is true; *total of all. Collective over the CTA.
__device__ int rank_in_cta(bool value, int* total) {
  __shared__ int warp_counts[kIndexWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned votes = __ballot_sync(kAllLanes, value);
  if (lane == 0) warp_counts[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1));
  *total = 0;
  for (int w = 0; w < kIndexWarps; ++w) {
    if (w < warp) before += warp_counts[w];
    *total += warp_counts[w];
  }
  __syncthreads();
  return before;
}

// The CTA of a rank: destinations, and counts of the rank and of its experts.
__device__ void index_for_rank(const IndexTokensParams& params, int rank, int* expert_counts) {
  const int num_local = params.num_experts / params.grid.num_ranks(), first_expert = rank * num_local;
  auto* destinations = reinterpret_cast<uint32_t*>(params.route + params.parts.destinations);
  for (int l = threadIdx.x; l < num_local; l += kIndexThreads) expert_counts[l] = 0;
  __syncthreads();
  int num_before = 0;
  for (int begin = 0; begin < params.num_tokens; begin += kIndexThreads) {
    const int token = begin + threadIdx.x;
    const int64_t* experts = params.topk_idx + static_cast<int64_t>(token) * params.num_topk;
    int column = -1;
    for (int k = 0; token < params.num_tokens && k < params.num_topk; ++k) {
      const int64_t local = experts[k] - first_expert;
      if (local < 0 || local >= num_local) continue;
      destinations[static_cast<int64_t>(token) * params.num_topk + k] = kNowhere;
      atomicAdd(&expert_counts[local], 1);
      if (column < 0) column = k;
    }
    int total;
    const int index = num_before + rank_in_cta(column >= 0, &total);
    if (column >= 0) {
      destinations[static_cast<int64_t>(token) * params.num_topk + column] = make_destination(rank, index);
    }
    num_before += total;
  }
  __syncthreads();
  for (int l = threadIdx.x; l < num_local; l += kIndexThreads) {
    params.route[params.parts.expert_counts + first_expert + l] = expert_counts[l];
  }
  if (threadIdx.x == 0) params.route[params.parts.rank_counts + rank] = num_before;
}

// The CTA of a domain: the list of its tokens. The CTA of domain 0 also reports expert indices out of range.
__device__ void index_for_domain(const IndexTokensParams& params, int domain) {
  const int num_experts = params.num_experts / params.grid.num_domains, first_expert = domain * num_experts;
  auto* destinations = reinterpret_cast<uint32_t*>(params.route + params.parts.destinations);
  int32_t* list = params.route + params.parts.domain_list + static_cast<int64_t>(domain) * params.num_tokens;
  int32_t* indices = params.route + params.parts.list_index + static_cast<int64_t>(domain) * params.num_tokens;
  int num_before = 0;
  for (int begin = 0; begin < params.num_tokens; begin += kIndexThreads) {
    const int token = begin + threadIdx.x;
    bool goes = false;
    for (int k = 0; token < params.num_tokens && k < params.num_topk; ++k) {
      const int64_t cell = static_cast<int64_t>(token) * params.num_topk + k, expert = params.topk_idx[cell];
      goes |= expert >= first_expert && expert < first_expert + num_experts;
      if (domain > 0 || (expert >= 0 && expert < params.num_experts)) continue;
      destinations[cell] = kNowhere;
      if (expert == -1) continue;
      refuse_expert(*params.own, expert);
    }
    int total;
    const int index = num_before + rank_in_cta(goes, &total);
    if (goes) list[index] = token;
    if (token < params.num_tokens) indices[token] = goes ? index : -1;
    num_before += total;
  }
  if (threadIdx.x == 0) params.route[params.parts.domain_counts + domain] = num_before;
}

__global__ void __launch_bounds__(kIndexThreads) index_tokens_kernel(const __grid_constant__ IndexTokensParams params) {
  extern __shared__ int expert_counts[];
  const int num_ranks = params.grid.num_ranks(), cta = blockIdx.x;
  if (cta < num_ranks) {
    index_for_rank(params, cta, expert_counts);
  } else {
    index_for_domain(params, cta - num_ranks);
  }
}

}  // namespace

void launch_index_tokens(const IndexTokensParams& params, cudaStream_t stream) {
  const int num_local = params.num_experts / params.grid.num_ranks();
  launch_kernel(LaunchKind::kPlain, index_tokens_kernel, params,
                dim3(params.grid.num_ranks() + params.grid.num_domains), kIndexThreads,
                num_local * static_cast<int>(sizeof(int)), stream);
}

}  // namespace hybrid_ep
