// The wire's limit, for `hybrid-ep bench`: rows pushed to where they belong, with nothing else to do.
//
//     x[t] ─ bulk load ─► shared memory ─ one bulk store per place ─► a row of that rank's memory
//
// No counts, no order, no metadata, no signals: one warp per SM moves rows as dispatch does (the same ring), and the
// kernel ends when its own stores are written.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/row_ring.cuh"
#include "kernels/launch.h"
#include "kernels/push_rows.h"

namespace hybrid_ep {
namespace {

constexpr int kPushStages = 14;

__global__ void __launch_bounds__(32, 1) push_rows_kernel(const __grid_constant__ PushRowsParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ uint64_t barriers[kPushStages];
  const int lane = threadIdx.x, first = blockIdx.x, stride = gridDim.x;
  const int count = first < params.num_rows ? (params.num_rows - first + stride - 1) / stride : 0;
  RowRing<kDispatchStoresInFlight> ring(stages, barriers, params.num_stages, params.row_bytes, lane);
  const auto row_of = [&](int i) { return params.rows + static_cast<int64_t>(first + i * stride) * params.row_bytes; };
  const auto load_place = [&](int i) -> int64_t {
    if (i >= count || lane >= params.num_places) return -1;
    return params.places[static_cast<int64_t>(first + i * stride) * params.num_places + lane];
  };
  for (int i = 0; i < min(count, ring.num_ahead()); ++i) ring.fetch(row_of(i));
  int64_t next = load_place(0);
  for (int i = 0; i < count; ++i) {
    const int64_t place = next;
    next = load_place(i + 1);
    const uint8_t* stage = ring.wait();
    if (place >= 0) {
      uint8_t* memory = params.memory[place >> 32];
      ptx::bulk_store(memory + (place & 0xffffffff) * params.row_bytes, stage, params.row_bytes);
    }
    ring.release();
    if (i + ring.num_ahead() < count) ring.fetch(row_of(i + ring.num_ahead()));
  }
  ptx::bulk_wait_written<0>();
}

}  // namespace

void launch_push_rows(PushRowsParams params, int num_sms, cudaStream_t stream) {
  allow_shared_memory(push_rows_kernel);
  params.num_stages = std::min(kPushStages, kDynamicSharedBytes / params.row_bytes);
  push_rows_kernel<<<num_sms, 32, params.num_stages * params.row_bytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of push_rows_kernel");
}

}  // namespace hybrid_ep
