// Counts for `get_dispatch_layout`. Each warp counts some tokens, a CTA sums them in shared memory, and all CTAs add to
// the totals. If these are not zero, a small launch before clears them; it overlaps with the counting.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/lanes.cuh"
#include "device/ptx/launch.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kThreads = 256;
// All CTAs add to the same totals: more of them would cost more than warps that take several steps.
constexpr int kTokensPerCta = 32;
constexpr int kMaxLayoutCtas = 512;

__host__ __device__ int num_totals(const LayoutParams& params) {
  return params.num_ranks + params.num_ranks / params.num_ranks_per_domain + params.num_experts;
}

__global__ void __launch_bounds__(kThreads) clear_totals_kernel(const __grid_constant__ LayoutParams params) {
  ptx::allow_next_kernel();
  for (int i = threadIdx.x; i < num_totals(params); i += kThreads) params.totals[i] = 0;
}

__global__ void __launch_bounds__(kThreads) layout_kernel(const __grid_constant__ LayoutParams params) {
  extern __shared__ int counts[];  // as totals
  const int lane = threadIdx.x % 32;
  const ExpertMap experts{params.num_experts, params.num_ranks};
  int* domain_counts = counts + params.num_ranks;
  int* expert_counts = domain_counts + params.num_ranks / params.num_ranks_per_domain;
  const int num_counts = num_totals(params);
  for (int i = threadIdx.x; i < num_counts; i += kThreads) counts[i] = 0;
  __syncthreads();
  const TokenLanes lanes(params.num_topk);
  const int num_ctas = gridDim.x, cta = blockIdx.x, tokens_per_cta = (params.num_tokens + num_ctas - 1) / num_ctas;
  const int end = min(params.num_tokens, (cta + 1) * tokens_per_cta), step = kThreads / 32 * lanes.num_tokens;
  for (int first = cta * tokens_per_cta + threadIdx.x / 32 * lanes.num_tokens; first < end; first += step) {
    const int token = first + lanes.token;
    const bool is_there = lanes.mates != 0 && token < end;
    int64_t expert = is_there ? params.topk_idx[static_cast<int64_t>(token) * params.num_topk + lanes.column] : -1;
    bool* in_rank = params.is_token_in_rank + static_cast<int64_t>(first) * params.num_ranks;
    const int num_cells = min(lanes.num_tokens, end - first) * params.num_ranks;
    for (int i = lane; i < num_cells; i += 32) in_rank[i] = false;
    if (expert < 0 || expert >= params.num_experts) expert = -1;  // dispatch reports what is not −1
    // The first lane of a token that has the value.
    const auto is_leader = [&](int value) {
      const unsigned same = __match_any_sync(kAllLanes, value);
      return value >= 0 && (same & lanes.mates & lanes.before) == 0;
    };
    const int rank = expert >= 0 ? experts.rank_of(expert) : -1;
    const bool counts_rank = is_leader(rank);
    const bool counts_domain = is_leader(rank >= 0 ? rank / params.num_ranks_per_domain : -1);
    __syncwarp();
    if (expert >= 0) atomicAdd(expert_counts + expert, 1);
    if (counts_domain) atomicAdd(domain_counts + rank / params.num_ranks_per_domain, 1);
    if (counts_rank) {
      atomicAdd(counts + rank, 1);
      in_rank[lanes.token * params.num_ranks + rank] = true;
    }
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();
  for (int i = threadIdx.x; i < num_counts; i += kThreads) {
    if (counts[i] != 0) atomicAdd(params.totals + i, counts[i]);
  }
}

}  // namespace

bool can_run_kernels() {
  cudaFuncAttributes attributes{};
  const bool can_run = cudaFuncGetAttributes(&attributes, clear_totals_kernel) == cudaSuccess;
  cudaGetLastError();  // or the next call would report it
  return can_run;
}

void launch_layout(const LayoutParams& params, bool totals_are_zero, cudaStream_t stream) {
  const int shared_bytes = num_totals(params) * static_cast<int>(sizeof(int));
  if (!totals_are_zero) launch_kernel(LaunchKind::kPlain, clear_totals_kernel, params, 1, kThreads, 0, stream);
  if (params.num_tokens == 0) return;
  const LaunchKind kind = totals_are_zero ? LaunchKind::kPlain : LaunchKind::kEarly;
  const int num_ctas = std::min((params.num_tokens + kTokensPerCta - 1) / kTokensPerCta, kMaxLayoutCtas);
  launch_kernel(kind, layout_kernel, params, num_ctas, kThreads, shared_bytes, stream);
}

}  // namespace hybrid_ep
