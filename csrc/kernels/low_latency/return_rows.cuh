// The send of a low-latency combine: a warp takes a segment of a token's rows, and stores the rows, or their weighted
// sum, into the source's buffer. Legend and data flow: combine.cu.
#pragma once

#include "device/bf16.cuh"
#include "device/lanes.cuh"
#include "device/logfmt.cuh"
#include "device/low_latency.cuh"
#include "device/row_ring.cuh"
#include "kernels/low_latency/low_latency.h"

namespace hybrid_ep {
namespace {

constexpr int kReturnWarps = 16;  // of an SM
constexpr int kReturnStages = 6;  // of a warp
constexpr int kReturnStoresInFlight = 2;
constexpr int kReturnRingBytes = kReturnWarps * kReturnStages * kSegmentBytes;
static_assert(kReturnRingBytes <= kDynamicSharedBytes);
constexpr int kWeightsInFlight = 8;  // 16-byte vectors of weights that a lane loads before it stores
// NOTE: the first threads announce what other ranks wait for. The warps of return_rows that wait for ranks have none of
// these threads, or ranks would wait for each other.
template <int kWarps>
constexpr int kAnnouncingThreads = (kWarps - (kMaxRanks + 31) / 32) * 32;

using SegmentRing = RowRing<kReturnStoresInFlight>;

__host__ __device__ int segments_of(const LowLatencyShape& shape) {
  return (2 * shape.hidden + kSegmentBytes - 1) / kSegmentBytes;
}

// The work item of a sending warp: one segment of a token's rows on this rank, or of their sum. Collective over the
// warp; lane i holds the i-th row.
struct Unit {
  int source, token;
  int begin, num_bytes;  // of each row
  int num_rows;
  int row, column;  // the packed row, and its column of top-k
  int num_fetched;

  // Units are in the order of tokens. Neighbouring units run on different SMs, and so go to different sources.
  static __device__ Unit find(const ReturnRowsParams& params, int index) {
    const LowLatencyShape& shape = params.shape;
    const int num_segments = segments_of(shape), lane = threadIdx.x % 32;
    const int pair = index / num_segments;
    Unit unit{};
    unit.source = pair % params.domain.num_ranks;
    unit.token = pair / params.domain.num_ranks;
    unit.begin = index % num_segments * kSegmentBytes;
    unit.num_bytes = min(kSegmentBytes, 2 * shape.hidden - unit.begin);
    int row = -1;
    if (unit.token < shape.max_tokens && lane < shape.num_topk) {
      row = params.row_of[(unit.source * shape.max_tokens + unit.token) * shape.num_topk + lane];
    }
    for (unsigned left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1) {
      if (lane == unit.num_rows++) unit.column = __ffs(left) - 1;
    }
    unit.row = __shfl_sync(kAllLanes, row, unit.column);
    return unit;
  }

  __device__ void fetch_next(const ReturnRowsParams& params, SegmentRing& ring) {
    if (num_fetched == num_rows) return;
    const int64_t its_row = __shfl_sync(kAllLanes, row, num_fetched++);
    ring.fetch(params.rows + its_row * 2 * params.shape.hidden + begin, num_bytes);
  }
  __device__ void fetch_ahead(const ReturnRowsParams& params, SegmentRing& ring) {
    for (int i = 0; i < ring.num_ahead(); ++i) fetch_next(params, ring);
  }
};

// The weights of a source's tokens at a rank: [M, K].
template <typename Params>
__device__ float* weights_of(const Params& params, int rank, int source) {
  return reinterpret_cast<float*>(buffer_of(params.domain, rank) + params.weights.begin +
                                  source * params.weights.rank_bytes);
}

// Sends this rank's weights to the other ranks, a warp to each, whether or not they sum. Few tokens need none. But a
// rank that goes along the handle of another dispatch may wait for them, so the flag is raised nevertheless.
template <typename Params>
__device__ void send_weights(const Params& params, const CtaOfRole& cta, const bool* present, uint32_t epoch) {
  const LowLatencyDomain& domain = params.domain;
  const int lane = threadIdx.x % 32;
  const bool has_few = params.num_tokens < kMinTokensToSum;
  // NOTE: the last vector may reach beyond the tensor, but not beyond the 16 bytes that its end is in.
  const int num_vectors = has_few ? 0 : (params.num_tokens * params.shape.num_topk + 3) / 4;
  const auto* weights = reinterpret_cast<const uint4*>(params.topk_weights);
  for (int r = cta.idx; r < domain.num_ranks; r += cta.count) {
    if (r == domain.rank || !present[r]) continue;
    auto* target = reinterpret_cast<uint4*>(weights_of(params, r, domain.rank));
    for (int first = lane; first < num_vectors; first += 32 * kWeightsInFlight) {
      uint4 vectors[kWeightsInFlight];
#pragma unroll
      for (int i = 0; i < kWeightsInFlight; ++i) {
        if (first + 32 * i < num_vectors) vectors[i] = ptx::load_streaming(weights + first + 32 * i);
      }
#pragma unroll
      for (int i = 0; i < kWeightsInFlight; ++i) {
        if (first + 32 * i < num_vectors) target[first + 32 * i] = vectors[i];
      }
    }
    uint32_t* flag = &channel_of(domain, r).weights_epoch[domain.rank];
    __syncwarp();
    if (lane == 0 && has_few) ptx::store_relaxed_system(flag, epoch);
    if (lane == 0 && !has_few) ptx::store_release_system(flag, epoch);
  }
}

// Adds the time of waiting for each rank's weights to wait_stats; a thread per rank.
__device__ void note_waits(const ReturnRowsParams& params, const int* num_received, const Waiter& waiter,
                           uint32_t epoch) {
  const int r = threadIdx.x;
  if (r >= params.domain.num_ranks || r == params.domain.rank || num_received[r] < params.min_tokens_to_sum) return;
  const uint64_t started = ptx::clock_ns();
  wait_for_weights(params.domain, waiter, epoch, r);
  add_to_wait_stats(params.wait_stats, r, started);
}

// Sends a unit: its rows as they are, or their sum into the first column. Lane i has the weight of the i-th row. Loads
// of the first rows are in flight. Rows of a source that was given up are dropped. Collective over the warp.
template <bool kLogFmt>
__device__ void send_unit(const ReturnRowsParams& params, Unit& unit, bool is_present, bool is_sum, float weight,
                          SegmentRing& ring) {
  const int lane = threadIdx.x % 32, row_bytes = 2 * params.shape.hidden;
  uint8_t* target = buffer_of(params.domain, unit.source) + unit.begin +
                    static_cast<int64_t>(unit.token) * params.shape.num_topk * row_bytes;
  float sum[kVectorsPerLane][8] = {};
  for (int i = 0; i < unit.num_rows; ++i) {
    const int64_t column = __shfl_sync(kAllLanes, unit.column, is_sum ? 0 : i);
    const bool is_last = i + 1 == unit.num_rows;
    uint8_t* segment = ring.wait();
    if (is_sum) {
      const float its_weight = __shfl_sync(kAllLanes, weight, i);
#pragma unroll
      for (int v = 0; v < kVectorsPerLane; ++v) {
        auto* vector = reinterpret_cast<uint4*>(segment) + v * 32 + lane;
        add_weighted(sum[v], *vector, its_weight);
        if (is_last) *vector = round_to_bf16(sum[v]);
      }
      if (is_last) ptx::fence_shared_for_bulk();
      __syncwarp();
    }
    if constexpr (kLogFmt) {
      if (is_present && (!is_sum || is_last)) {
        const LogRow row{target - unit.begin + column * row_bytes, params.shape.hidden};
        send_as_logfmt(segment, row, unit.begin, unit.num_bytes);
      }
    } else if (lane == 0 && is_present && (!is_sum || is_last)) {
      ptx::bulk_store(target + column * row_bytes, segment, unit.num_bytes);
    }
    ring.release();
    unit.fetch_next(params, ring);
  }
}

template <bool kLogFmt, int kWarps>
__device__ __forceinline__ void return_rows(const ReturnRowsParams& params, const CtaOfRole& cta, uint8_t* stages) {
  __shared__ uint64_t barriers[kWarps * kReturnStages];
  __shared__ bool present[kMaxRanks];
  __shared__ int num_received[kMaxRanks];
  __shared__ uint32_t epoch, num_too_many;
  __shared__ LowLatencyNumber number;
  const LowLatencyDomain& domain = params.domain;
  const LowLatencyShape& shape = params.shape;
  const Waiter waiter = waiter_of_send(domain, KernelName::kLowLatencyCombine);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  SegmentRing ring(stages + warp * kReturnStages * kSegmentBytes, barriers + warp * kReturnStages, kReturnStages,
                   kSegmentBytes, lane);

  // The last warps wait for the ranks while the others load their first rows.
  const int peer = kWarps * 32 - 1 - tid;
  if (peer < domain.num_ranks) {
    const int received = params.num_received[peer], too_many = *params.num_too_many;
    const LowLatencyNumber its_number = *params.number;
    const uint32_t this_epoch = next_epoch(channel_of(domain, domain.rank).send);
    present[peer] = wait_until_free(domain, waiter, this_epoch, peer);
    num_received[peer] = received;
    if (peer == 0) {
      epoch = this_epoch;
      num_too_many = too_many;
      number = its_number;
    }
  }
  __syncwarp();
  int index = warp * cta.count + cta.idx;
  Unit unit = Unit::find(params, index);
  unit.fetch_ahead(params, ring);
  if (cta.idx == 0) announce_free_buffers(domain, kAnnouncingThreads<kWarps>);
  __syncthreads();
  if (warp == kWarps - 1) send_weights(params, cta, present, epoch);  // this warp gets the fewest units
  if (params.wait_stats != nullptr && cta.idx == 0) note_waits(params, num_received, waiter, epoch);
  __syncwarp();

  bool has_lost = peer < domain.num_ranks && !present[peer];  // other CTAs may have sent to that rank
  int max_tokens = 0;
  for (int r = lane; r < domain.num_ranks; r += 32) max_tokens = max(max_tokens, num_received[r]);
  const int num_units = __reduce_max_sync(kAllLanes, max_tokens) * domain.num_ranks * segments_of(shape);
  while (index < num_units) {
    index += cta.count * kWarps;
    Unit next{};
    if (index < num_units) next = Unit::find(params, index);  // while the rows come
    const bool is_sum = unit.num_rows > 1 && num_received[unit.source] >= params.min_tokens_to_sum;
    bool is_present = present[unit.source];
    float weight = 0;
    if (is_sum && is_present) {
      const bool is_local = unit.source == domain.rank;
      is_present = is_local || wait_for_weights(domain, waiter, epoch, unit.source);
      is_present = __all_sync(kAllLanes, is_present);
      has_lost |= !is_present;
      const int position = unit.token * shape.num_topk + unit.column;
      const float* weights = is_local ? params.topk_weights : weights_of(params, domain.rank, unit.source);
      if (is_present && lane < unit.num_rows) weight = __ldcg(weights + position);
    }
    send_unit<kLogFmt>(params, unit, is_present, is_sum, weight, ring);
    unit = next;
    unit.fetch_ahead(params, ring);
  }
  if (lane == 0) ptx::bulk_wait_written<0>();
  const auto value = [&] {
    return num_too_many != 0 ? kTooManyRowsBit | num_too_many : params.min_tokens_to_sum | (kLogFmt ? kLogFmtBit : 0);
  };
  finish_send(domain, present, epoch, value, number, has_lost, cta.count);
}

}  // namespace
}  // namespace hybrid_ep
