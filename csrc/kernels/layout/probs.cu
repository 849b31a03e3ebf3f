// Weights in the columns of a top-k to probabilities of all experts, and back. Torch would take ten launches one way
// and four the other.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/lanes.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxProbsCtas = 1024;

// Each warp clears the probabilities of some tokens, and writes those of the experts that they name.
__global__ void __launch_bounds__(kThreads) weights_to_probs_kernel(const __grid_constant__ ProbsParams params) {
  const int lane = threadIdx.x % 32, warp = (blockIdx.x * kThreads + threadIdx.x) / 32;
  const TokenLanes lanes(params.num_topk);
  const int step = gridDim.x * (kThreads / 32) * lanes.num_tokens;
  for (int first = warp * lanes.num_tokens; first < params.num_tokens; first += step) {
    const int token = first + lanes.token;
    const int64_t cell = static_cast<int64_t>(token) * params.num_topk + lanes.column;
    const bool is_there = lanes.mates != 0 && token < params.num_tokens;
    const int64_t index = is_there ? params.topk_idx[cell] : -1;
    const int expert = index >= 0 && index < params.num_experts ? static_cast<int>(index) : -1;
    const float weight = expert >= 0 ? params.weights[cell] : 0.0f;
    const unsigned same = __match_any_sync(kAllLanes, expert) & lanes.mates;
    double total = 0;  // not float: the order of the columns must not show
    for (int column = 0; column < params.num_topk; ++column) {
      const int mate = lanes.first + column;
      const float other = __shfl_sync(kAllLanes, weight, mate % 32);
      if (mate < 32 && (same >> mate & 1) != 0) total += other;
    }
    float* probs = params.probs + static_cast<int64_t>(first) * params.num_experts;
    const int num_cells = min(lanes.num_tokens, params.num_tokens - first) * params.num_experts;
    for (int i = lane; i < num_cells; i += 32) probs[i] = 0.0f;
    __syncwarp();
    const bool is_first = (same & lanes.before) == 0;
    if (expert >= 0 && is_first) {
      probs[lanes.token * params.num_experts + expert] = params.adds_columns ? static_cast<float>(total) : weight;
    }
  }
}

__global__ void __launch_bounds__(kThreads) probs_to_weights_kernel(const __grid_constant__ ProbsParams params) {
  const int64_t num_cells = static_cast<int64_t>(params.num_tokens) * params.num_topk, step = gridDim.x * kThreads;
  for (int64_t cell = blockIdx.x * kThreads + threadIdx.x; cell < num_cells; cell += step) {
    const int64_t expert = params.topk_idx[cell], token = cell / params.num_topk;
    const bool is_named = expert >= 0 && expert < params.num_experts;
    params.weights[cell] = is_named ? params.probs[token * params.num_experts + expert] : 0.0f;
  }
}

void launch(void (*kernel)(ProbsParams), const ProbsParams& params, int64_t num_threads, cudaStream_t stream) {
  if (num_threads == 0) return;
  const int num_ctas = static_cast<int>(std::min<int64_t>((num_threads + kThreads - 1) / kThreads, kMaxProbsCtas));
  launch_kernel(LaunchKind::kPlain, kernel, params, num_ctas, kThreads, 0, stream);
}

}  // namespace

void launch_weights_to_probs(const ProbsParams& params, cudaStream_t stream) {
  const int tokens_of_warp = 32 / params.num_topk;
  const int64_t num_warps = (params.num_tokens + tokens_of_warp - 1) / tokens_of_warp;
  launch(weights_to_probs_kernel, params, 32 * num_warps, stream);
}

void launch_probs_to_weights(const ProbsParams& params, cudaStream_t stream) {
  launch(probs_to_weights_kernel, params, static_cast<int64_t>(params.num_tokens) * params.num_topk, stream);
}

}  // namespace hybrid_ep
