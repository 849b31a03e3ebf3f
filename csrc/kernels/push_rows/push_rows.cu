// The wire's limit, for `hybrid-ep bench`: rows pushed to where they belong, with nothing else to do.
//
//     x[t] ─ bulk load ─► shared memory ─ one bulk store per destination ─► a row of that rank's memory
//
// No counts, no order, no metadata, no signals: two warps per SM move rows as those of a dispatch do, and the kernel
// ends when its own stores are written.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/row_sender.cuh"
#include "kernels/launch.h"
#include "kernels/push_rows/push_rows.h"

namespace hybrid_ep {
namespace {

constexpr int kMaxPushWarps = 2;
constexpr int kPushStages = 7;  // of a warp

__global__ void __launch_bounds__(kMaxPushWarps * 32, 1)
    push_rows_kernel(const __grid_constant__ PushRowsParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ uint64_t barriers[kMaxPushWarps][kPushStages];
  __shared__ int32_t indices[kMaxPushWarps][kPushStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32 * gridDim.x;
  RowSender<kDispatchStoresInFlight> sender({params.rows, params.num_rows, params.row_bytes}, num_warps,
                                            params.num_stages, stages + warp * params.num_stages * params.row_bytes,
                                            barriers[warp], indices[warp]);
  sender.begin(warp * gridDim.x + blockIdx.x);
  const auto load_dst = [&](int row, int) -> int64_t {
    return lane < params.num_dst_rows ? params.dst_rows[static_cast<int64_t>(row) * params.num_dst_rows + lane] : -1;
  };
  const auto target_of = [&](int64_t dst, int) -> uint8_t* {
    if (dst < 0) return nullptr;
    return params.memory[dst >> 32] + (dst & 0xffffffff) * params.row_bytes;
  };
  sender.send<1>(&params.progress->sent_rows, load_dst, target_of);
  __syncthreads();
  if (threadIdx.x > 0 || ptx::add_acq_rel_gpu(&params.progress->finished_ctas, 1) != gridDim.x - 1) return;
  *params.progress = {};
}

}  // namespace

void launch_push_rows(PushRowsParams params, int num_sms, cudaStream_t stream) {
  allow_shared_memory(push_rows_kernel);
  const int rows_that_fit = kDynamicSharedBytes / params.row_bytes;
  const int num_warps = std::clamp(rows_that_fit / (kDispatchStoresInFlight + 1), 1, kMaxPushWarps);
  params.num_stages = std::min(kPushStages, rows_that_fit / num_warps);
  const int ring_bytes = num_warps * params.num_stages * params.row_bytes;
  launch_kernel(LaunchKind::kPlain, push_rows_kernel, params, num_sms, num_warps * 32, ring_bytes, stream);
}

}  // namespace hybrid_ep
