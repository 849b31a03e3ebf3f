// Logical to physical experts: a thread for each copy of a token. Where an expert has several replicas, tokens take
// turns by their index (hybrid_ep/balance/placement.py).
#include <algorithm>

#include "kernels/balance/balance.h"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxMapCtas = 1024;
constexpr uint32_t kTokenStep = 0x9E3779B1u;  // as the torch form has it

__global__ void __launch_bounds__(kThreads) map_topk_kernel(const __grid_constant__ MapTopkParams params) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < params.num_copies; i += step) {
    const int64_t expert = params.topk_idx[i];
    if (expert < 0 || expert >= params.num_experts) {
      params.slots[i] = expert < 0 ? expert : params.num_slots + expert;  // dispatch reports what is no slot
      continue;
    }
    const uint32_t turn = static_cast<uint32_t>(i / params.num_topk) * kTokenStep + params.rank_turn;
    const uint64_t nth = static_cast<uint64_t>(turn) * static_cast<uint64_t>(params.num_choices[expert]) >> 32;
    params.slots[i] = params.replicas[expert * params.max_replicas + static_cast<int64_t>(nth)];
  }
}

}  // namespace

void launch_map_topk(const MapTopkParams& params, cudaStream_t stream) {
  if (params.num_copies == 0) return;
  const int64_t num_ctas = std::min((params.num_copies + kThreads - 1) / kThreads, kMaxMapCtas);
  launch_kernel(LaunchKind::kPlain, map_topk_kernel, params, static_cast<unsigned>(num_ctas), kThreads, 0, stream);
}

}  // namespace hybrid_ep
