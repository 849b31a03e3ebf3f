// Parts of experts from one table to another: item i of the target becomes item index[i] of the source, and stays what
// it is where the index is −1. Both may have gaps between their items.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/balance/balance.h"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

constexpr int kThreads = 512;
constexpr int kLoadsAtOnce = 4;
constexpr int64_t kMaxCopyCtas = 1024;  // of all items

__global__ void __launch_bounds__(kThreads) take_experts_kernel(const __grid_constant__ TakeExpertsParams params) {
  const int64_t from = params.index[blockIdx.y];
  if (from < 0) return;
  const auto* source = reinterpret_cast<const uint4*>(params.source + from * params.source_stride);
  auto* target = reinterpret_cast<uint4*>(params.target + static_cast<int64_t>(blockIdx.y) * params.target_stride);
  const int64_t num_vectors = params.num_bytes / static_cast<int64_t>(sizeof(uint4));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kLoadsAtOnce;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kLoadsAtOnce + threadIdx.x; first < num_vectors;
       first += step) {
    uint4 loaded[kLoadsAtOnce];
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      if (first + i * kThreads < num_vectors) loaded[i] = source[first + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      if (first + i * kThreads < num_vectors) target[first + i * kThreads] = loaded[i];
    }
  }
}

}  // namespace

void launch_take_experts(const TakeExpertsParams& params, cudaStream_t stream) {
  if (params.num_items == 0 || params.num_bytes == 0) return;
  const int64_t per_cta = static_cast<int64_t>(sizeof(uint4)) * kThreads * kLoadsAtOnce;
  const int64_t num_parts = (params.num_bytes + per_cta - 1) / per_cta;
  const int64_t num_ctas = std::min(num_parts, std::max<int64_t>(1, kMaxCopyCtas / params.num_items));
  launch_kernel(LaunchKind::kPlain, take_experts_kernel, params,
                dim3(static_cast<unsigned>(num_ctas), static_cast<unsigned>(params.num_items)), kThreads, 0, stream);
}

}  // namespace hybrid_ep
