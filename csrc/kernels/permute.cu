// What stays inside a rank around expert-major output: copies for further experts on the way in.
//
//     push ─► rows[lowest place of a token] ─ duplicate ─► rows[its other places], pads and tail = 0
//
// A token crosses NVLink once per rank and not once per expert. The kernel runs at the speed of local memory on all
// SMs; a warp takes a row at a time. The sums on the way back are in expert_rows.cuh.
#include <cuda_runtime.h>

#include "device/ptx/memory.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kCtasPerSm = 4;
constexpr int kVectorsAhead = 4;  // 16-byte loads that a lane has in flight

__device__ int num_received(const int32_t* rank_prefix, int rank, int num_ranks, int limit) {
  return min(rank_prefix[(num_ranks - 1) * num_ranks + rank], limit);
}

// Copies one row to the places of the lanes in `targets`. Collective over the warp.
__device__ void copy_row(uint8_t* rows, int row_bytes, int source, int place, unsigned targets, int lane) {
  const uint8_t* from = rows + static_cast<int64_t>(source) * row_bytes;
  for (int begin = 0; begin < row_bytes; begin += kVectorsAhead * 512) {
    uint4 vectors[kVectorsAhead];
#pragma unroll
    for (int v = 0; v < kVectorsAhead; ++v) {
      const int offset = begin + v * 512 + lane * 16;
      if (offset < row_bytes) vectors[v] = ptx::load_streaming(from + offset);
    }
    for (unsigned left = targets; left != 0; left &= left - 1) {
      const int64_t to = __shfl_sync(kAllLanes, place, __ffs(left) - 1);
#pragma unroll
      for (int v = 0; v < kVectorsAhead; ++v) {
        const int offset = begin + v * 512 + lane * 16;
        if (offset < row_bytes) *reinterpret_cast<uint4*>(rows + to * row_bytes + offset) = vectors[v];
      }
    }
  }
}

__device__ void clear_row(const DuplicateParams& params, int64_t row, int lane) {
  for (int offset = lane * 16; offset < params.row_bytes; offset += 512) {
    *reinterpret_cast<uint4*>(params.rows + row * params.row_bytes + offset) = make_uint4(0, 0, 0, 0);
  }
  for (int s = lane; s < params.num_scales; s += 32) params.permuted_scales[row * params.num_scales + s] = 0;
  if (lane == 0 && params.probs != nullptr) params.probs[row] = 0.0f;
}

__global__ void __launch_bounds__(kThreads) duplicate_kernel(const __grid_constant__ DuplicateParams params) {
  const int lane = threadIdx.x % 32;
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / 32, num_warps = gridDim.x * kThreads / 32;
  const int num_recv = num_received(params.rank_prefix, params.rank, params.num_ranks, params.recv_limit);
  for (int n = warp; n < num_recv; n += num_warps) {
    const int64_t cell = static_cast<int64_t>(n) * params.num_topk + lane;
    int place = lane < params.num_topk ? params.places[cell] : -1;
    if (params.kept_places != nullptr && lane < params.num_topk) params.kept_places[cell] = place;
    if (params.kept_places != nullptr && lane == 0) params.row_epoch[n] = 0;
    if (place >= params.row_limit) place = -1;
    const unsigned targets = __ballot_sync(kAllLanes, place >= 0);
    const int source = __reduce_min_sync(kAllLanes, place >= 0 ? place : INT32_MAX);
    if (targets == 0) continue;
    if (params.probs != nullptr && place >= 0) params.probs[place] = params.weights[cell];
    for (int s = lane; s < params.num_scales; s += 32) {
      const uint32_t scale = params.scales[static_cast<int64_t>(n) * params.num_scales + s];
      for (unsigned left = targets; left != 0; left &= left - 1) {
        // NOTE: the place is read again, because a shuffle needs all lanes and there may be fewer scales.
        const int to = params.places[static_cast<int64_t>(n) * params.num_topk + __ffs(left) - 1];
        params.permuted_scales[static_cast<int64_t>(to) * params.num_scales + s] = scale;
      }
    }
    const unsigned others = targets & ~__ballot_sync(kAllLanes, place == source);
    if (others == 0) continue;
    copy_row(params.rows, params.row_bytes, source, place, others, lane);
  }

  // Pads after each expert's rows, and rows after the last expert's.
  int block_begin = 0;
  for (int e = 0; e < params.num_local_experts; ++e) {
    const int used = params.num_rows_per_expert[e], padded = params.num_tokens_per_expert[e];
    for (int row = block_begin + used + warp; row < min(block_begin + padded, params.row_limit); row += num_warps) {
      clear_row(params, row, lane);
    }
    block_begin += padded;
  }
  for (int row = block_begin + warp; row < params.row_limit; row += num_warps) clear_row(params, row, lane);
}

int num_ctas() {
  static const int count = [] {
    int device = 0, num_sms = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return num_sms * kCtasPerSm;
  }();
  return count;
}

}  // namespace

void launch_duplicate(const DuplicateParams& params, cudaStream_t stream) {
  duplicate_kernel<<<num_ctas(), kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of duplicate_kernel");
}

}  // namespace hybrid_ep
