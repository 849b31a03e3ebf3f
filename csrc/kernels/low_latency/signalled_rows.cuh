// The order in which a sending warp takes packed rows that experts still write. Legend: combine.cu.
#pragma once

#include "device/low_latency.cuh"
#include "device/row_ring.cuh"
#include "kernels/low_latency/low_latency.h"

namespace hybrid_ep {
namespace {

constexpr int kReturnStoresInFlight = 2;

using SegmentRing = RowRing<kReturnStoresInFlight>;

// A segment of a packed row that is being loaded, and its destination.
struct Piece {
  uint8_t* target;  // nullptr: to a rank that takes no part
  int num_bytes;
  int begin;  // in the row
};

// Iterates over the packed rows, a segment at a time, in the order in which experts write them. Collective over the
// warp.
class SignalledRows {
 public:
  __device__ SignalledRows(const ReturnSignalledRowsParams& params, int first, int step)
      : params_(params), step_(step), next_(first), expert_(-1) {
    enter_next_expert();
  }

  __device__ bool has_next() const { return expert_ < num_local(); }

  // Returns whether the next segment's signal has been raised. With `waits` it waits for the signal first.
  __device__ bool is_raised(const Waiter& waiter, bool waits) {
    const int row = next_ / num_segments();
    if (row < num_raised_) return true;
    const uint32_t* signal = params_.signals.raised + signal_idx();
    bool raised = false;
    if (threadIdx.x % 32 == 0) {
      raised = waits ? waiter.until_raised(signal, params_.signals.expected)
                     : Waiter::has_been_raised(signal, params_.signals.expected);
      if (raised) ptx::fence_global_for_bulk();
    }
    raised = __shfl_sync(kAllLanes, raised, 0);
    if (raised) num_raised_ = (row / params_.signals.rows_per_signal + 1) * params_.signals.rows_per_signal;
    return raised;
  }

  // Index of the next segment's signal.
  __device__ int signal_idx() const {
    const int row = next_ / num_segments();
    return expert_ * params_.signals.num_per_expert + row / params_.signals.rows_per_signal;
  }

  // Begins to load the next segment, and advances.
  __device__ Piece fetch(SegmentRing& ring, const bool* present) {
    const LowLatencyShape& shape = params_.shape;
    const int lane = threadIdx.x % 32, row_bytes = 2 * shape.hidden;
    const int row = next_ / num_segments(), begin = next_ % num_segments() * kSegmentBytes;
    const int packed_row = expert_ * capacity() + row;
    Piece piece{nullptr, min(kSegmentBytes, row_bytes - begin), begin};
    ring.fetch(params_.rows + static_cast<int64_t>(packed_row) * row_bytes + begin, piece.num_bytes);
    int source = -1;
    for (int r = lane; r < params_.domain.num_ranks; r += 32) {
      const int64_t range = params_.layout_range[expert_ * params_.domain.num_ranks + r];
      const int its_begin = static_cast<int>(range >> 32), its_count = static_cast<int>(range);
      if (row >= its_begin && row < its_begin + its_count) source = r;
    }
    source = __reduce_max_sync(kAllLanes, source);
    const int token = params_.src_info[packed_row];
    int column = -1;
    for (int k = lane; k < shape.num_topk && source >= 0; k += 32) {
      if (params_.row_of[(source * shape.max_tokens + token) * shape.num_topk + k] == packed_row) column = k;
    }
    column = __reduce_max_sync(kAllLanes, column);
    if (column >= 0 && present[source]) {
      const int64_t cell = static_cast<int64_t>(token) * shape.num_topk + column;
      piece.target = buffer_of(params_.domain, source) + cell * row_bytes + begin;
    }
    next_ += step_;
    if (next_ >= num_items_) enter_next_expert();
    return piece;
  }

  __device__ void give_up() { expert_ = num_local(); }

 private:
  __device__ int num_local() const { return params_.shape.num_experts / params_.domain.num_ranks; }
  __device__ int capacity() const { return params_.shape.max_tokens * params_.domain.num_ranks; }
  __device__ int num_segments() const { return (2 * params_.shape.hidden + kSegmentBytes - 1) / kSegmentBytes; }

  // Items are numbered across all experts, so that warps share them evenly.
  __device__ void enter_next_expert() {
    do {
      if (expert_ >= 0) next_ -= num_items_;
      if (++expert_ == num_local()) return;
      // Dispatch has reported an expert with more rows than its capacity.
      num_items_ = min(params_.count[expert_], capacity()) * num_segments();
    } while (next_ >= num_items_);
    num_raised_ = 0;
  }

  const ReturnSignalledRowsParams& params_;
  int step_, next_, expert_;
  int num_items_ = 0, num_raised_ = 0;  // of this expert: segments, and rows that are known to be written
};

}  // namespace
}  // namespace hybrid_ep
