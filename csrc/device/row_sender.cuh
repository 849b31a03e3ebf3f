// A warp that sends rows of a table to other ranks. The warps of a kernel share the rows. Each warp's first rows are
// assigned statically, so that their loads can begin early; warps claim the others by work index.
//
//     rows[i] ─ bulk load ─► stage of the warp's ring ─ one bulk store per destination ─► memory of a rank
//
// Each lane serves kDstPerLane destinations and stores the row to them. Every function is collective over the warp. A
// warp that sends nothing has a ring without stages.
#pragma once

#include "device/row_ring.cuh"
#include "device/work_index.cuh"

namespace hybrid_ep {

struct RowTable {
  const uint8_t* rows;  // [num_rows, row_bytes]
  int num_rows, row_bytes;
};

template <int kInFlight>
class RowSender {
 public:
  // `stages`, `barriers` and `indices` have num_stages entries each: a row, its barrier, and which row it is.
  __device__ RowSender(const RowTable& table, int num_warps, int num_stages, uint8_t* stages, uint64_t* barriers,
                       int32_t* indices)
      : table_(table),
        num_warps_(num_warps),
        ring_(stages, barriers, num_stages, table.row_bytes, threadIdx.x % 32),
        indices_(indices) {}

  // Begins to load the first rows; `number` is the warp's, 0 … num_warps − 1.
  __device__ void begin(int number) {
#pragma unroll 1  // runs once, with cold instruction caches
    for (int i = 0; i < ring_.num_ahead(); ++i) fetch(number + i * num_warps_);
  }

  // Sends the first rows of begin() and all further ones. `counter` is 0 before the kernel begins. For destination q of
  // a lane, load_dst(row, q) begins to load its row there, and target_of(dst, q) returns the address or nullptr.
  template <int kDstPerLane, typename LoadDst, typename TargetOf>
  __device__ void send(uint32_t* counter, LoadDst&& load_dst, TargetOf&& target_of) {
    using Dst = decltype(load_dst(0, 0));
    WorkIndices<2> items(counter, num_warps_ * ring_.num_ahead());
    Dst dst[kDstPerLane], next[kDstPerLane];
    const auto load_all = [&](int stage, Dst(&all)[kDstPerLane]) {
      __syncwarp();
#pragma unroll
      for (int q = 0; q < kDstPerLane; ++q) all[q] = load_dst(indices_[stage], q);
    };
    if (num_ahead_ > 0) load_all(ring_.stage(), dst);
    for (; num_ahead_ > 0; --num_ahead_) {
      const bool knows_next = num_ahead_ > 1;
      if (knows_next) load_all(ring_.next_stage(), next);
      const uint8_t* stage = ring_.wait();
#pragma unroll
      for (int q = 0; q < kDstPerLane; ++q) {
        uint8_t* target = target_of(dst[q], q);
        if (target != nullptr) ptx::bulk_store(target, stage, table_.row_bytes);
      }
      ring_.release();
      if (has_more_) fetch(items.take());
      if (!knows_next && num_ahead_ > 1) load_all(ring_.stage(), next);
#pragma unroll
      for (int q = 0; q < kDstPerLane; ++q) dst[q] = next[q];
    }
    ptx::bulk_wait_written<0>();
  }

  // Takes the place of send() where nothing is sent: waits until no load into shared memory is in flight.
  __device__ void drop() { ring_.drop(num_ahead_); }

 private:
  __device__ void fetch(int index) {
    has_more_ = index < table_.num_rows;
    if (!has_more_) return;
    if (threadIdx.x % 32 == 0) indices_[ring_.load_stage()] = index;
    ring_.fetch(table_.rows + static_cast<int64_t>(index) * table_.row_bytes);
    ++num_ahead_;
  }

  const RowTable table_;
  const int num_warps_;
  RowRing<kInFlight> ring_;
  int32_t* indices_;
  int num_ahead_ = 0;  // rows fetched and not sent
  bool has_more_ = true;
};

}  // namespace hybrid_ep
