// How a combine sums rows: a warp makes one result at a time, and loads segments of its addends into shared memory.
//
//     result ─► per segment, sources in order: bulk load ─► stage ─► fp32 sum ─► one rounding ─► its row
//
// Bulk loads keep more bytes in flight than registers could hold. Each warp has its own ring, so no warp waits for
// another. The sum is then bound by the instructions for each segment. So segments are as long as registers allow, and
// one descriptor for each segment saves a second walk over the sources. partial_rows.cuh and expert_rows.cuh define
// what is summed and where it goes.
#pragma once

#include "device/bf16.cuh"
#include "device/lanes.cuh"
#include "device/row_ring.cuh"

namespace hybrid_ep {
namespace {

constexpr int kSumStages = 3;
constexpr int kSumVectorsPerLane = 8;  // 16-byte vectors of a segment
constexpr int kSumSegmentBytes = kSumVectorsPerLane * 32 * 16;
constexpr int kSumRingBytes = kSumStages * kSumSegmentBytes;

// Walks the addresses of a result's sources, in ascending order, once for each segment; all lanes together.
template <int kPerLane, typename T>
class SourceWalk {
 public:
  SourceWalk() = default;
  // `of_source`: the rows of sources lane, lane + 32, …; nullptr if a source has none.
  __device__ explicit SourceWalk(const T* const (&of_source)[kPerLane]) {
#pragma unroll
    for (int q = 0; q < kPerLane; ++q) {
      of_source_[q] = of_source[q];
      present_[q] = __ballot_sync(kAllLanes, of_source[q] != nullptr);
    }
    restart();
  }

  __device__ void restart() {
#pragma unroll
    for (int q = 0; q < kPerLane; ++q) left_[q] = present_[q];
  }

  __device__ bool is_done() const {
    unsigned left = 0;
#pragma unroll
    for (int q = 0; q < kPerLane; ++q) left |= left_[q];
    return left == 0;
  }

  // Must not be called if is_done().
  __device__ const T* next() {
#pragma unroll
    for (int q = 0; q < kPerLane; ++q) {
      if (left_[q] == 0) continue;
      const int lane = __ffs(left_[q]) - 1;
      left_[q] &= left_[q] - 1;
      return reinterpret_cast<const T*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(of_source_[q]), lane));
    }
    return nullptr;
  }

 private:
  const T* of_source_[kPerLane];
  unsigned present_[kPerLane], left_[kPerLane];
};

// Sums the weights of a result's sources, in order. Collective over the warp.
template <int kPerLane>
__device__ void sum_weights(SourceWalk<kPerLane, float> walk, int num_weights, float* result) {
  for (int begin = 0; begin < num_weights; begin += 32) {
    const int k = begin + threadIdx.x % 32;
    float sum = 0;
    for (walk.restart(); !walk.is_done();) {
      const float* weights = walk.next();
      if (k < num_weights) sum += __ldcg(weights + k);
    }
    if (k < num_weights) result[k] = sum;
  }
}

// What a stage of a summing warp holds: a segment of one source's row.
struct alignas(16) Segment {
  int row, begin;  // of the result, and of the byte in it
  int num_bytes;
  bool is_last;  // the sum is complete
  bool ends;     // and with it the result
};

// Loads what a warp sums: for each result its segments, for each segment the sources in order. It runs ahead of the
// sums by as much as the ring holds, also beyond the end of a result. Collective over the warp.
template <typename Rows>
class SegmentLoads {
 public:
  __device__ SegmentLoads(Rows& rows, RowRing<0>& ring, Segment* segments)
      : rows_(rows), ring_(ring), segments_(segments) {}

  // Loads the next segment once it has arrived. Returns false if there is none.
  __device__ bool fetch() {
    if (begin_ >= end_) {
      if (!rows_.next(walk_)) return false;
      begin_ = rows_.begin();
      end_ = rows_.end();
    }
    const uint8_t* from = walk_.next() + begin_;
    const int num_bytes = min(kSumSegmentBytes, end_ - begin_);
    const bool is_last = walk_.is_done();
    if (threadIdx.x % 32 == 0) {
      segments_[ring_.load_stage()] = {rows_.row(), begin_, num_bytes, is_last, is_last && begin_ + num_bytes == end_};
    }
    ring_.fetch(from, num_bytes);
    if (is_last) {
      begin_ += kSumSegmentBytes;
      walk_.restart();
    }
    return true;
  }

 private:
  Rows& rows_;
  RowRing<0>& ring_;
  Segment* segments_;
  int begin_ = 0, end_ = 0;  // in the row of the result
  SourceWalk<Rows::kSourcesPerLane, uint8_t> walk_;
};

// Stores a lane's vectors of a row, which are 512 bytes apart, from byte `offset` on.
template <int kVectors>
__device__ void store_vectors(uint8_t* row, int row_bytes, int offset, const float (&sum)[kVectors][8]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (offset + v * 512 >= row_bytes) continue;
    *reinterpret_cast<uint4*>(row + offset + v * 512) = round_to_bf16(sum[v]);
  }
}

// Adds the biases to a lane's vectors of a token, in fp32, and stores them. `Params` are those of a combine.
template <int kVectors, typename Params>
__device__ void store_with_bias(const Params& params, int token, int offset, float (&sum)[kVectors][8]) {
  const int64_t begin = static_cast<int64_t>(token) * params.row_bytes;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    if (params.bias[b] == nullptr) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (offset + v * 512 >= params.row_bytes) continue;
      add_bf16(sum[v], ptx::load_streaming(params.bias[b] + begin + offset + v * 512));
    }
  }
  store_vectors(params.out + begin, params.row_bytes, offset, sum);
}

// Stores zeros, and biases, where a result has no sources.
template <typename Rows>
__device__ void store_nothing(Rows& rows, int row) {
#pragma unroll 1
  for (int offset = rows.begin() + 16 * (threadIdx.x % 32); offset < rows.end(); offset += 512) {
    float nothing[1][8] = {};
    rows.store(row, offset, nothing);
  }
  rows.finish(row);
}

// Sums the results of a warp until next() finds none and all before are stored. Collective over the warp, which has a
// ring of its own with a segment for each stage. What is summed:
//   next(walk)                goes on to the next result that has sources; false if there is none now
//   is_done()                 whether next() will return nothing more
//   row(), begin(), end()     of that result, and which of its bytes; parts of a row are whole segments
//   store(row, offset, sum)   takes the sums of a lane's vectors, from byte `offset` on and 512 bytes apart
//   finish(row)               once all of a result is stored
//   kCopies                   whether a result may have a single source, which needs no arithmetic. Then is_copy(row)
//                             says so, and copy(row, offset, stage, num_bytes) moves a segment by a bulk store
//
// NOTE: the loop calls next(), store() and finish() in one place each. They are inlined, and next() is most of a
// kernel.
template <typename Rows>
__device__ void sum_rows_here(Rows& rows, RowRing<0>& ring, Segment* segments) {
  const int lane = threadIdx.x % 32;
  SegmentLoads<Rows> loads(rows, ring, segments);
  float sum[kSumVectorsPerLane][8] = {};
  const auto is_copy = [](int row) {
    if constexpr (Rows::kCopies) return Rows::is_copy(row);
    return false;
  };
  Segment read{};  // the segment that the warp has added last; a sum is stored once the next load has begun
  int num_ahead = 0;
  while (true) {
    while (num_ahead < kSumStages && loads.fetch()) ++num_ahead;
    if (read.is_last) {
      if (!is_copy(read.row)) {
        rows.store(read.row, read.begin + lane * 16, sum);
#pragma unroll
        for (int v = 0; v < kSumVectorsPerLane; ++v) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[v][i] = 0;
        }
      }
      if (read.ends) rows.finish(read.row);
    }
    if (num_ahead == 0) return;
    const uint8_t* stage = ring.wait();
    read = segments[ring.stage()];
    if (is_copy(read.row)) {
      if constexpr (Rows::kCopies) rows.copy(read.row, read.begin, stage, read.num_bytes);
    } else {
      const auto* vectors = reinterpret_cast<const uint4*>(stage) + lane;
#pragma unroll
      for (int v = 0; v < kSumVectorsPerLane / 2; ++v) add_bf16(sum[v], vectors[v * 32]);
      if (read.num_bytes > kSumSegmentBytes / 2) {  // a row's last one may be short
#pragma unroll
        for (int v = kSumVectorsPerLane / 2; v < kSumVectorsPerLane; ++v) add_bf16(sum[v], vectors[v * 32]);
      }
    }
    ring.release();
    --num_ahead;
  }
}

// Sums all results of a warp. Collective over it.
template <typename Rows>
__device__ void sum_rows(Rows& rows, RowRing<0>& ring, Segment* segments) {
  while (!rows.is_done()) sum_rows_here(rows, ring, segments);
}

// The same with kSumRingBytes of stages, and kSumStages barriers and segments.
template <typename Rows>
__device__ void sum_rows(Rows& rows, uint8_t* stages, uint64_t* barriers, Segment* segments) {
  RowRing<0> ring(stages, barriers, kSumStages, kSumSegmentBytes, threadIdx.x % 32);
  sum_rows(rows, ring, segments);
}

}  // namespace
}  // namespace hybrid_ep
