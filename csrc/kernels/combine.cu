// Combine inside a domain: push to the source, sum there, in one persistent launch.
//
//     rows of source i ─ bulk load ─► shared memory ─ bulk store ─► i's arena ─ chunk_epoch ─┐
//     send_slot[t] ─► partial rows of token t from each rank ─► fp32 sum in rank order ◄─────┘ ─► + bias ─► out[t]
//
// The rows of one source are one run of x, and land as one run in the source's arena, so the push copies chunks. Rows
// that this rank sent to itself are not moved: the sum reads them from x. Pushing, and not pulling, lets x be any
// memory. The first warps of a CTA send, the others sum. Legend: T tokens, R ranks, N received rows, H hidden, W
// weights.
#include <cuda_runtime.h>

#include "device/bf16.cuh"
#include "device/epilogue.cuh"
#include "device/row_ring.cuh"
#include "device/wait.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kVectorsPerLane = 4;  // 16-byte vectors that a lane sums at once
constexpr int kSegmentBytes = kVectorsPerLane * 32 * 16;

struct Routes {
  int send_begin[kMaxRanks];  // first row of x that belongs to source i
  int send_count[kMaxRanks];  // rows of x that belong to source i
  int send_base[kMaxRanks];   // first row of this rank in i's arena
  int recv_base[kMaxRanks];   // first row of rank j in this rank's arena
};

// All of it follows from the matrix of counts, which every rank has: nothing needs to be exchanged.
__device__ void find_bases(const CombineParams& params, Routes& routes) {
  const int me = params.domain.rank, num_ranks = params.domain.num_ranks;
  const auto count = [&](int from, int to) {
    const int32_t* prefix = params.rank_prefix + to;
    return prefix[from * num_ranks] - (from > 0 ? prefix[(from - 1) * num_ranks] : 0);
  };
  for (int r = threadIdx.x; r < num_ranks; r += kCombineThreads) {
    routes.send_begin[r] = r > 0 ? params.rank_prefix[(r - 1) * num_ranks + me] : 0;
    routes.send_count[r] = count(r, me);
    // A source keeps the partial rows of each rank, itself left out, in ascending order of rank.
    int send_base = 0, recv_base = 0;
    for (int j = 0; j < me; ++j) send_base += j == r ? 0 : count(r, j);
    for (int j = 0; j < r; ++j) recv_base += j == me ? 0 : count(me, j);
    routes.send_base[r] = send_base;
    routes.recv_base[r] = recv_base;
    // Only a rank's arena that was sized by a bound can be too small.
    const int recv_end = recv_base + (r == me ? 0 : count(me, r));
    if (blockIdx.x == 0 && recv_end > params.slot.capacity) {
      report_fault(params.domain.fault, FaultKind::kOverflow, KernelName::kCombine, WaitTag::kPartialRows, me, r,
                   params.slot.capacity, recv_end);
    }
  }
}

// Sends chunks of rows home, all sources in turn, so that no source waits for another's rows.
__device__ bool send_rows(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint8_t* shared,
                          uint64_t* barriers, uint32_t epoch) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_peers = domain.num_ranks - 1;
  if (num_peers == 0) return true;
  bool ok = true;
  int max_count = 0;
  for (int r = lane; r < domain.num_ranks; r += 32) {
    if (r == domain.rank) continue;
    ok &= waiter.until_epoch(&own.ready_epoch[r], epoch, r, WaitTag::kReady);
    max_count = max(max_count, routes.send_count[r]);
  }
  if (!__all_sync(kAllLanes, ok)) return false;
  max_count = __reduce_max_sync(kAllLanes, max_count);

  RowRing ring(shared + static_cast<int64_t>(warp) * params.num_stages * params.row_bytes,
               barriers + warp * params.num_stages, params.num_stages, params.row_bytes, lane);
  const int num_items = (max_count + kRowsPerChunk - 1) / kRowsPerChunk * num_peers;
  for (int item = blockIdx.x * params.num_send_warps + warp; item < num_items;
       item += gridDim.x * params.num_send_warps) {
    const int chunk = item / num_peers;
    const int source = (domain.rank + 1 + item % num_peers) % domain.num_ranks;
    const int begin = chunk * kRowsPerChunk;
    const int count = min(kRowsPerChunk, routes.send_count[source] - begin);
    if (count <= 0) continue;
    const int64_t from = routes.send_begin[source] + begin;
    const int64_t to = routes.send_base[source] + begin;
    uint8_t* slot = domain.arena[source];  // partial rows always land in the arena's first slot
    // NOTE: rows that do not exist (a bound was exceeded) are not sent, but their chunk is still reported.
    const int fitting = min(count, static_cast<int>(min(params.num_rows - from, params.slot.capacity - to)));
    const uint8_t* rows = params.rows + from * params.row_bytes;
    uint8_t* target = slot + params.slot.rows + to * params.row_bytes;
    for (int i = 0; i < min(fitting, ring.num_ahead()); ++i)
      ring.fetch(rows + static_cast<int64_t>(i) * params.row_bytes);
    for (int i = 0; i < fitting; ++i) {
      const uint8_t* stage = ring.wait();
      if (lane == 0) ptx::bulk_store(target + static_cast<int64_t>(i) * params.row_bytes, stage, params.row_bytes);
      ring.release();
      if (i + ring.num_ahead() < fitting)
        ring.fetch(rows + static_cast<int64_t>(i + ring.num_ahead()) * params.row_bytes);
    }
    if (params.num_weights > 0) {
      const float* weights = params.weights + from * params.num_weights;
      auto* weights_target = reinterpret_cast<float*>(slot + params.slot.weights) + to * params.num_weights;
      for (int j = lane; j < fitting * params.num_weights; j += 32) weights_target[j] = weights[j];
    }
    ptx::bulk_wait_written();
    __syncwarp();
    if (lane == 0) {
      ptx::fence_acq_rel_system();
      ptx::store_release_system(&domain.control[source]->chunk_epoch[domain.rank][chunk], epoch);
    }
  }
  return true;
}

// Sums tokens, a segment of the row at a time, ranks ascending, as their partial rows arrive.
__device__ bool reduce_tokens(const CombineParams& params, const Routes& routes, const Waiter& waiter, uint32_t epoch) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  const int lane = threadIdx.x % 32;
  const int num_warps = kCombineThreads / 32 - params.num_send_warps;
  const int warp = threadIdx.x / 32 - params.num_send_warps;
  const int num_segments = (params.row_bytes + kSegmentBytes - 1) / kSegmentBytes;
  const int64_t num_units = static_cast<int64_t>(params.num_tokens) * num_segments;
  const uint8_t* arena = domain.arena[domain.rank];
  bool ok = true;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * num_warps + warp; unit < num_units && ok;
       unit += static_cast<int64_t>(gridDim.x) * num_warps) {
    const int64_t token = unit / num_segments;
    const int segment = static_cast<int>(unit % num_segments) * kSegmentBytes;
    float sum[kVectorsPerLane][8] = {};
    const bool sums_weights = segment == 0 && params.num_weights > 0;
    for (int k = lane; sums_weights && k < params.num_weights; k += 32) {
      params.out_weights[token * params.num_weights + k] = 0.0f;
    }
    for (int base = 0; base < domain.num_ranks; base += 32) {
      // Lane r waits for the chunk that brings this token's row from rank r.
      const int r = base + lane;
      const int place = r < domain.num_ranks ? params.send_slot[token * domain.num_ranks + r] : -1;
      int64_t row = -1;
      if (place >= 0 && r != domain.rank) {
        ok &= waiter.until_epoch(&own.chunk_epoch[r][place / kRowsPerChunk], epoch, r, WaitTag::kPartialRows);
        row = routes.recv_base[r] + place;
        if (row >= params.slot.capacity) row = -1;
      } else if (place >= 0) {
        row = routes.send_begin[r] + place;
        if (row >= params.num_rows) row = -1;
      }
      ok = __all_sync(kAllLanes, ok);
      if (!ok) break;
      for (unsigned ranks = __ballot_sync(kAllLanes, row >= 0); ranks != 0; ranks &= ranks - 1) {
        const int source_lane = __ffs(ranks) - 1;
        const int64_t source_row = __shfl_sync(kAllLanes, row, source_lane);
        const bool is_local = base + source_lane == domain.rank;
        const uint8_t* from = (is_local ? params.rows : arena + params.slot.rows) + source_row * params.row_bytes;
        uint4 vectors[kVectorsPerLane];
#pragma unroll
        for (int v = 0; v < kVectorsPerLane; ++v) {
          const int offset = segment + (v * 32 + lane) * 16;
          vectors[v] = offset < params.row_bytes ? ptx::load_streaming(from + offset) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int v = 0; v < kVectorsPerLane; ++v) add_bf16(sum[v], vectors[v]);
        if (!sums_weights) continue;
        const float* weights =
            (is_local ? params.weights : reinterpret_cast<const float*>(arena + params.slot.weights)) +
            source_row * params.num_weights;
        for (int k = lane; k < params.num_weights; k += 32) {
          params.out_weights[token * params.num_weights + k] += __ldcg(weights + k);
        }
      }
    }
    if (!ok) break;
#pragma unroll
    for (int v = 0; v < kVectorsPerLane; ++v) {
      const int offset = segment + (v * 32 + lane) * 16;
      if (offset >= params.row_bytes) continue;
      const int64_t position = token * params.row_bytes + offset;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (params.bias[b] != nullptr) add_bf16(sum[v], ptx::load_streaming(params.bias[b] + position));
      }
      *reinterpret_cast<uint4*>(params.out + position) = round_to_bf16(sum[v]);
    }
  }
  return ok;
}

__global__ void __launch_bounds__(kCombineThreads, 1) combine_kernel(const __grid_constant__ CombineParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Routes routes;
  __shared__ uint64_t barriers[kMaxSendWarps * kMaxStages];
  const Domain& domain = params.domain;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kCombine, domain.rank, domain.timeout_ns);
  const uint32_t epoch = ptx::load_acquire_gpu(&own.combine_epoch) + 1;

  // This kernel runs, so nothing reads the arena's first slot any more: peers may write it.
  if (blockIdx.x == 0) {
    for (int r = threadIdx.x; r < domain.num_ranks; r += kCombineThreads) {
      ptx::store_release_system(&domain.control[r]->ready_epoch[domain.rank], epoch);
    }
  }
  find_bases(params, routes);
  __syncthreads();
  const bool sends = static_cast<int>(threadIdx.x) / 32 < params.num_send_warps;
  const bool ok =
      sends ? send_rows(params, routes, waiter, shared, barriers, epoch) : reduce_tokens(params, routes, waiter, epoch);
  if (finish_cta(own, ok)) end_kernel(own, own.combine_epoch, epoch);
}

}  // namespace

void launch_combine(const CombineParams& params, int num_sms, int shared_bytes, cudaStream_t stream) {
  launch_cooperative(combine_kernel, params, num_sms, kCombineThreads, shared_bytes, stream);
}

}  // namespace hybrid_ep
