// How a combine sums: a warp takes a token at a time, and brings the segments of its partial rows to shared memory.
//
//     token ─► wait for its chunks ─► per segment, ranks ascending: bulk load ─► stage ─► fp32 sum ─► + bias ─► out
//
// Bulk loads keep more bytes on their way than a thread has registers for, and each warp has a ring of its own, so that
// no warp waits for another. What bounds the sum is then how many instructions a segment costs: therefore the longest
// segments that fit registers, and one descriptor of a segment instead of walking a second time.
#pragma once

#include "device/bf16.cuh"
#include "device/row_ring.cuh"
#include "device/wait.cuh"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kSumWarps = 9;
constexpr int kSumStages = 3;
constexpr int kVectorsPerLane = 8;  // 16-byte vectors of a segment
constexpr int kSegmentBytes = kVectorsPerLane * 32 * 16;
constexpr int kSumRingBytes = kSumStages * kSegmentBytes;

// What the ranks have for a token, ranks ascending, over and over; all lanes together.
template <int kRanksPerLane, typename T>
class SourceWalk {
 public:
  SourceWalk() = default;
  // `of_rank` is what ranks lane, lane + 32, … have; nullptr where they have nothing.
  __device__ explicit SourceWalk(const T* const (&of_rank)[kRanksPerLane]) {
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      of_rank_[q] = of_rank[q];
      present_[q] = __ballot_sync(kAllLanes, of_rank[q] != nullptr);
    }
    restart();
  }

  __device__ void restart() {
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) left_[q] = present_[q];
  }

  __device__ bool is_done() const {
    unsigned left = 0;
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) left |= left_[q];
    return left == 0;
  }

  // There must be one left.
  __device__ const T* next() {
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      if (left_[q] == 0) continue;
      const int lane = __ffs(left_[q]) - 1;
      left_[q] &= left_[q] - 1;
      return reinterpret_cast<const T*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(of_rank_[q]), lane));
    }
    return nullptr;
  }

 private:
  const T* of_rank_[kRanksPerLane];
  unsigned present_[kRanksPerLane], left_[kRanksPerLane];
};

// Adds the biases of a token's byte `offset` on to a lane's vectors, which are 512 bytes apart, and stores them.
template <int kVectors>
__device__ void store_sum(const CombineParams& params, int token, int offset, float (&sum)[kVectors][8]) {
  const int64_t position = static_cast<int64_t>(token) * params.row_bytes + offset;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    if (params.bias[b] == nullptr) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (offset + v * 512 >= params.row_bytes) continue;
      add_bf16(sum[v], ptx::load_streaming(params.bias[b] + position + v * 512));
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (offset + v * 512 >= params.row_bytes) continue;
    *reinterpret_cast<uint4*>(params.out + position + v * 512) = round_to_bf16(sum[v]);
  }
}

// What a stage of a summing warp holds: a segment of one rank's partial row.
struct alignas(16) Segment {
  int token, begin;  // of the result's row, and of the byte in it
  int num_bytes;
  int is_last;  // the sum is complete
};

// Asks for the partial rows of a warp's tokens: tokens in turn, of each its segments, of each the ranks ascending. It
// runs ahead of the sums by as much as the ring holds, beyond the end of a token too. Collective over the warp.
template <int kRanksPerLane>
class PartialRows {
 public:
  // The warp takes each `stride`-th token from `first` on.
  __device__ PartialRows(const CombineParams& params, const int* row_begin, const Waiter& waiter, uint32_t epoch,
                         int first, int stride, RowRing<0>& ring, Segment* segments)
      : params_(params),
        row_begin_(row_begin),
        waiter_(waiter),
        epoch_(epoch),
        token_(first - stride),
        stride_(stride),
        ring_(ring),
        segments_(segments) {
    load_places(first);
  }

  // Asks for the next segment, once it has arrived. Returns false if there is none, or a rank has not come.
  __device__ bool fetch() {
    if (begin_ >= params_.row_bytes && !begin_token()) return false;
    const uint8_t* from = walk_.next() + begin_;
    const int num_bytes = min(kSegmentBytes, params_.row_bytes - begin_);
    const bool is_last = walk_.is_done();
    if (threadIdx.x % 32 == 0) segments_[ring_.load_stage()] = {token_, begin_, num_bytes, is_last};
    ring_.fetch(from, num_bytes);
    if (is_last) {
      begin_ += kSegmentBytes;
      walk_.restart();
    }
    return true;
  }

  __device__ bool ok() const { return ok_; }

 private:
  // Of each lane's ranks: the place of a token's row among those that this rank has sent there, or −1.
  __device__ void load_places(int token) {
    const int num_ranks = params_.domain.num_ranks;
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      const int r = threadIdx.x % 32 + 32 * q;
      const int64_t cell = static_cast<int64_t>(token) * num_ranks + r;
      places_[q] = token < params_.num_tokens && r < num_ranks ? params_.send_slot[cell] : -1;
    }
  }

  // Goes on to the next token that has partial rows, and waits for them; lane r for those of rank r.
  __device__ bool begin_token() {
    const Domain& domain = params_.domain;
    const ControlBlock& own = *domain.control[domain.rank];
    const uint8_t* slot = domain.arena[domain.rank];
    const auto* slot_weights = reinterpret_cast<const float*>(slot + params_.slot.weights);
    while (ok_) {
      token_ += stride_;
      if (token_ >= params_.num_tokens) return false;
      const uint8_t* rows[kRanksPerLane];
      const float* weights[kRanksPerLane];
#pragma unroll
      for (int q = 0; q < kRanksPerLane; ++q) {
        const int r = threadIdx.x % 32 + 32 * q, place = places_[q];
        rows[q] = nullptr;
        weights[q] = nullptr;
        if (place < 0) continue;
        const bool is_local = r == domain.rank;
        if (!is_local) {
          ok_ &= waiter_.until_epoch(&own.chunk_epoch[r][place / kRowsPerChunk], epoch_, r, WaitTag::kPartialRows);
        }
        const int64_t row = static_cast<int64_t>(row_begin_[r]) + place;
        if (row >= (is_local ? params_.num_rows : params_.slot.capacity)) continue;
        rows[q] = (is_local ? params_.rows : slot + params_.slot.rows) + row * params_.row_bytes;
        weights[q] = (is_local ? params_.weights : slot_weights) + row * params_.num_weights;
      }
      ok_ = __all_sync(kAllLanes, ok_);
      if (!ok_) return false;
      __syncwarp();
      ptx::fence_global_for_bulk();  // lane 0 loads what others have waited for
      load_places(token_ + stride_);
      if (params_.num_weights > 0) sum_weights(SourceWalk<kRanksPerLane, float>(weights));
      walk_ = SourceWalk<kRanksPerLane, uint8_t>(rows);
      if (!walk_.is_done()) {
        begin_ = 0;
        return true;
      }
#pragma unroll 1
      for (int offset = 16 * (threadIdx.x % 32); offset < params_.row_bytes; offset += 512) {
        float nothing[1][8] = {};
        store_sum(params_, token_, offset, nothing);
      }
    }
    return false;
  }

  __device__ void sum_weights(SourceWalk<kRanksPerLane, float> walk) {
    const int num_weights = params_.num_weights;
    for (int begin = 0; begin < num_weights; begin += 32) {
      const int k = begin + threadIdx.x % 32;
      float sum = 0;
      for (walk.restart(); !walk.is_done();) {
        const float* weights = walk.next();
        if (k < num_weights) sum += __ldcg(weights + k);
      }
      if (k < num_weights) params_.out_weights[static_cast<int64_t>(token_) * num_weights + k] = sum;
    }
  }

  const CombineParams& params_;
  const int* row_begin_;  // first row of rank j: in the arena, this rank's own in x
  const Waiter& waiter_;
  const uint32_t epoch_;
  int token_;
  const int stride_;
  int begin_ = INT32_MAX;  // in the token's row
  bool ok_ = true;
  int places_[kRanksPerLane];
  SourceWalk<kRanksPerLane, uint8_t> walk_;
  RowRing<0>& ring_;
  Segment* segments_;
};

// Sums this rank's tokens as their partial rows arrive. Collective over one of kSumWarps warps, which has a ring of its
// own: kSumRingBytes of stages, and kSumStages barriers and segments. `row_begin` tells where each rank's rows begin.
// Returns false if a rank has not come.
template <int kRanksPerLane>
__device__ bool sum_tokens(const CombineParams& params, const int* row_begin, const Waiter& waiter, uint32_t epoch,
                           int warp, uint8_t* stages, uint64_t* barriers, Segment* segments) {
  const int lane = threadIdx.x % 32;
  RowRing<0> ring(stages, barriers, kSumStages, kSegmentBytes, lane);
  // Neighbouring tokens go to different CTAs: their rows arrive together.
  PartialRows<kRanksPerLane> rows(params, row_begin, waiter, epoch, warp * gridDim.x + blockIdx.x,
                                  kSumWarps * gridDim.x, ring, segments);
  int num_ahead = 0;
  while (num_ahead < kSumStages && rows.fetch()) ++num_ahead;
  float sum[kVectorsPerLane][8] = {};
  while (num_ahead > 0) {
    const auto* vectors = reinterpret_cast<const uint4*>(ring.wait()) + lane;
    const Segment segment = segments[ring.stage()];
#pragma unroll
    for (int v = 0; v < kVectorsPerLane / 2; ++v) add_bf16(sum[v], vectors[v * 32]);
    if (segment.num_bytes > kSegmentBytes / 2) {  // a row's last one may be short
#pragma unroll
      for (int v = kVectorsPerLane / 2; v < kVectorsPerLane; ++v) add_bf16(sum[v], vectors[v * 32]);
    }
    ring.release();
    if (!rows.fetch()) --num_ahead;
    if (segment.is_last) {
      store_sum(params, segment.token, segment.begin + lane * 16, sum);
#pragma unroll
      for (int v = 0; v < kVectorsPerLane; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[v][i] = 0;
      }
    }
  }
  return rows.ok();
}

}  // namespace
}  // namespace hybrid_ep
