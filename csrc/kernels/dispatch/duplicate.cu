// Expert-major output inside a rank: copies of a token's row for its further experts here.
//
//     push ─► rows[lowest row of a token] ─ duplicate ─► rows[its other rows], padding = 0
//
// A token crosses NVLink once per rank and not once per expert. The kernel runs on all SMs, at the rate of local
// memory. A warp takes a row at a time, and loads the next while it stores. The sums of combine are in expert_rows.cuh.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/lanes.cuh"
#include "device/ptx/memory.cuh"
#include "device/row_ring.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr int kMaxWarps = 16;
constexpr int kStages = 3;  // of a warp's ring: one being loaded, one being stored, and one whose stores are ending
constexpr int kStoresInFlight = 1;

__device__ int num_received(const int32_t* rank_prefix, int rank, int num_ranks, int limit) {
  return min(rank_prefix[(num_ranks - 1) * num_ranks + rank], limit);
}

__device__ void clear_row(const DuplicateParams& params, int64_t row, int lane) {
  for (int offset = lane * 16; offset < params.row_bytes; offset += 512) {
    *reinterpret_cast<uint4*>(params.rows + row * params.row_bytes + offset) = make_uint4(0, 0, 0, 0);
  }
  for (int s = lane; s < params.num_scales; s += 32) params.permuted_scales[row * params.num_scales + s] = 0;
  if (lane == 0 && params.probs != nullptr) params.probs[row] = 0.0f;
}

// Walks every `stride`-th received row, and writes its metadata; all lanes together.
class RowsWithCopies {
 public:
  __device__ RowsWithCopies(const DuplicateParams& params, int first, int stride)
      : params_(params),
        num_recv_(num_received(params.rank_prefix, params.rank, params.num_ranks, params.recv_limit)),
        row_(first - stride),
        stride_(stride) {}

  // Goes on to the next row that needs copies. Returns false if there is none.
  __device__ bool next() {
    const int lane = threadIdx.x % 32;
    while ((row_ += stride_) < num_recv_) {
      const int64_t cell = static_cast<int64_t>(row_) * params_.num_topk + lane;
      int row = lane < params_.num_topk ? params_.dst_row[cell] : -1;
      if (params_.kept_dst_row != nullptr && lane < params_.num_topk) params_.kept_dst_row[cell] = row;
      if (params_.kept_dst_row != nullptr && lane == 0) params_.row_epoch[row_] = 0;
      if (row >= params_.row_limit) row = -1;
      source_ = __reduce_min_sync(kAllLanes, row >= 0 ? row : INT32_MAX);
      if (params_.probs != nullptr && row >= 0) params_.probs[row] = params_.weights[cell];
      const unsigned lanes = __ballot_sync(kAllLanes, row >= 0);
      if (params_.num_scales > 0) copy_scales(lanes);
      target_ = row == source_ ? -1 : row;
      if (__ballot_sync(kAllLanes, target_ >= 0) != 0) return true;
    }
    return false;
  }

  __device__ int source() const { return source_; }
  __device__ int target() const { return target_; }  // of this lane, or −1

 private:
  __device__ void copy_scales(unsigned lanes) const {
    for (int s = threadIdx.x % 32; s < params_.num_scales; s += 32) {
      const uint32_t scale = params_.scales[static_cast<int64_t>(row_) * params_.num_scales + s];
      for (unsigned left = lanes; left != 0; left &= left - 1) {
        // NOTE: the row is read again, because a shuffle needs all lanes and there may be fewer scales.
        const int to = params_.dst_row[static_cast<int64_t>(row_) * params_.num_topk + __ffs(left) - 1];
        params_.permuted_scales[static_cast<int64_t>(to) * params_.num_scales + s] = scale;
      }
    }
  }

  const DuplicateParams& params_;
  const int num_recv_;
  int row_;
  const int stride_;
  int source_ = 0, target_ = -1;
};

__global__ void __launch_bounds__(kMaxWarps * 32, 1) duplicate_kernel(const __grid_constant__ DuplicateParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[kMaxWarps][kStages];
  const int lane = threadIdx.x % 32, warp_of_cta = threadIdx.x / 32;
  const int warp = warp_of_cta * gridDim.x + blockIdx.x, num_warps = gridDim.x * (blockDim.x / 32);
  const int64_t row_bytes = params.row_bytes;
  RowRing<kStoresInFlight> ring(shared + warp_of_cta * kStages * row_bytes, barriers[warp_of_cta], kStages,
                                params.row_bytes, lane);
  RowsWithCopies rows(params, warp, num_warps);
  bool is_row = rows.next();
  if (is_row) ring.fetch(params.rows + rows.source() * row_bytes);
  while (is_row) {
    const int target = rows.target();
    is_row = rows.next();
    if (is_row) ring.fetch(params.rows + rows.source() * row_bytes);
    const uint8_t* stage = ring.wait();
    if (target >= 0) ptx::bulk_store(params.rows + target * row_bytes, stage, params.row_bytes);
    ring.release();
  }

  // Padding after each expert's rows; the warps take it in turn. Rows after the last expert's stay as they are: a bound
  // may leave more of them than arrive.
  int next_warp = 0;
  const auto clear_rows = [&](int begin, int end) {
    const int turn = warp - next_warp;
    for (int row = begin + (turn < 0 ? turn + num_warps : turn); row < end; row += num_warps) {
      clear_row(params, row, lane);
    }
    next_warp += max(end - begin, 0);
    if (next_warp >= num_warps) next_warp %= num_warps;
  };
  int block_begin = 0;
  for (int first = 0; first < params.num_local_experts; first += 32) {
    const bool is_expert = first + lane < params.num_local_experts;
    const int used = is_expert ? params.num_rows_per_expert[first + lane] : 0;
    const int padded = is_expert ? params.num_tokens_per_expert[first + lane] : 0;
    for (int e = 0; e < min(32, params.num_local_experts - first); ++e) {
      const int block_end = block_begin + __shfl_sync(kAllLanes, padded, e);
      clear_rows(block_begin + __shfl_sync(kAllLanes, used, e), min(block_end, params.row_limit));
      block_begin = block_end;
    }
  }
  const int end = params.probs != nullptr ? params.row_limit : 0;
  for (int row = block_begin + warp * 32 + lane; row < end; row += num_warps * 32) params.probs[row] = 0.0f;
  ptx::bulk_wait_read<0>();
}

}  // namespace

void prepare_duplicate() { allow_shared_memory(duplicate_kernel); }

void launch_duplicate(const DuplicateParams& params, int num_sms, cudaStream_t stream) {
  const int ring_bytes = kStages * params.row_bytes;
  const int num_warps = std::clamp(kDynamicSharedBytes / ring_bytes, 1, kMaxWarps);
  launch_kernel(LaunchKind::kPlain, duplicate_kernel, params, num_sms, num_warps * 32, num_warps * ring_bytes, stream);
}

}  // namespace hybrid_ep
