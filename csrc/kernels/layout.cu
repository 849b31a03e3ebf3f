// Counts for `get_dispatch_layout`: one launch over all tokens, a warp per token, sums in shared memory first.
#include <cuda_runtime.h>

#include "kernels/launch.h"
#include "kernels/params.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kTokensPerCta = 64;

__global__ void __launch_bounds__(kThreads) layout_kernel(const __grid_constant__ LayoutParams params) {
  extern __shared__ int counts[];  // [R] tokens per rank, then [E] tokens per expert
  const int lane = threadIdx.x % 32;
  const ExpertMap experts{params.num_experts, params.num_ranks};
  for (int i = threadIdx.x; i < params.num_ranks + params.num_experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int end = min(params.num_tokens, static_cast<int>(blockIdx.x + 1) * kTokensPerCta);
  for (int token = blockIdx.x * kTokensPerCta + threadIdx.x / 32; token < end; token += kThreads / 32) {
    bool* in_rank = params.is_token_in_rank + static_cast<int64_t>(token) * params.num_ranks;
    for (int r = lane; r < params.num_ranks; r += 32) in_rank[r] = false;
    int64_t expert =
        lane < params.num_topk ? params.topk_idx[static_cast<int64_t>(token) * params.num_topk + lane] : -1;
    if (expert >= params.num_experts) expert = -1;  // dispatch reports it
    const unsigned same_expert = __match_any_sync(kAllLanes, static_cast<int>(expert));
    const bool is_first = expert >= 0 && __ffs(same_expert) - 1 == lane;
    const int rank = is_first ? experts.rank_of(expert) : -1;
    const unsigned same_rank = __match_any_sync(kAllLanes, rank);
    __syncwarp();
    if (is_first) atomicAdd(counts + params.num_ranks + expert, 1);
    if (is_first && __ffs(same_rank) - 1 == lane) {
      atomicAdd(counts + rank, 1);
      in_rank[rank] = true;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < params.num_ranks + params.num_experts; i += kThreads) {
    int32_t* total =
        i < params.num_ranks ? params.num_tokens_per_rank + i : params.num_tokens_per_expert + i - params.num_ranks;
    if (counts[i] != 0) atomicAdd(total, counts[i]);
  }
}

}  // namespace

void launch_layout(const LayoutParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return;
  const int num_ctas = (params.num_tokens + kTokensPerCta - 1) / kTokensPerCta;
  const int shared_bytes = (params.num_ranks + params.num_experts) * static_cast<int>(sizeof(int));
  layout_kernel<<<num_ctas, kThreads, shared_bytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of layout_kernel");
}

}  // namespace hybrid_ep
