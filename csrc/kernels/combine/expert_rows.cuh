// The first sum of a combine from experts: the rows of one token at several experts of this rank.
//
//     received row ─► its copies, experts ascending ─► fp32 sum ─► rows[received row] ─► row_epoch
//     row_epoch ─► the warp that sends the row, or that sums it on this rank
//
// Separate CTAs make these sums, on SMs that the combine leaves free: local memory brings several bytes for each byte
// that crosses the wire. They sum rows in sending order and wait for nothing.
#pragma once

#include "kernels/combine/routes.cuh"
#include "kernels/combine/sum_rows.cuh"

namespace hybrid_ep {
namespace {

// Of sum_rows.
class ExpertRows {
 public:
  static constexpr int kSourcesPerLane = 1;
  static constexpr bool kCopies = false;

  // The warp takes each `stride`-th row from `first` on, in sending order.
  __device__ ExpertRows(const CombineParams& params, const CombineRoutes& routes, uint32_t epoch, int first, int stride)
      : params_(params), routes_(routes), epoch_(epoch), position_(first - stride), stride_(stride) {
    look_ahead();
  }

  __device__ int row() const { return row_; }
  __device__ int begin() const { return 0; }
  __device__ int end() const { return params_.row_bytes; }
  __device__ bool is_done() const { return next_row_ < 0; }

  __device__ bool next(SourceWalk<1, uint8_t>& walk) {
    const ExpertRowParams& experts = params_.experts;
    const int lane = threadIdx.x % 32;
    while (!is_done()) {
      row_ = next_row_;
      const int dst_row = next_dst_row_ < experts.row_limit ? next_dst_row_ : -1;
      look_ahead();
      if (lane < params_.num_weights) {
        const int64_t cell = static_cast<int64_t>(row_) * params_.num_weights + lane;
        experts.sum_weights[cell] = dst_row >= 0 ? experts.probs[dst_row] : 0.0f;
      }
      const uint8_t* copies[1] = {nullptr};
      const int sorted = sort_over_lanes(dst_row);
      if (sorted >= 0) copies[0] = experts.rows + static_cast<int64_t>(sorted) * params_.row_bytes;
      walk = SourceWalk<1, uint8_t>(copies);
      if (!walk.is_done()) return true;
      store_nothing(*this, row_);
    }
    return false;
  }

  template <int kVectors>
  __device__ void store(int row, int offset, const float (&sum)[kVectors][8]) const {
    store_vectors(params_.experts.sums + static_cast<int64_t>(row) * params_.row_bytes, params_.row_bytes, offset, sum);
  }

  __device__ void finish(int row) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::store_release_gpu(&params_.experts.row_epoch[row], epoch_);
  }

 private:
  // Finds the next row, or −1, and begins to load its copies' rows. The order is that of send_rows: the first chunk of
  // each source, then the second ones.
  __device__ void look_ahead() {
    const Domain& domain = params_.domain;
    const int lane = threadIdx.x % 32, num_topk = params_.experts.num_topk;
    const int num_chunks = (routes_.max_count + kRowsPerChunk - 1) / kRowsPerChunk;
    next_row_ = -1;
    while (next_row_ < 0) {
      position_ += stride_;
      const int item = position_ / kRowsPerChunk, chunk = item / domain.num_ranks;
      if (chunk >= num_chunks) return;
      const int source = (domain.rank + item % domain.num_ranks) % domain.num_ranks;
      const int index = chunk * kRowsPerChunk + position_ % kRowsPerChunk;
      const int row = routes_.send_begin[source] + index;
      if (index < routes_.send_count[source] && row < params_.num_rows) next_row_ = row;
    }
    const int64_t cell = static_cast<int64_t>(next_row_) * num_topk + lane;
    next_dst_row_ = lane < num_topk ? params_.experts.dst_row[cell] : -1;
  }

  const CombineParams& params_;
  const CombineRoutes& routes_;
  const uint32_t epoch_;
  int position_;  // in sending order
  const int stride_;
  int row_ = -1, next_row_, next_dst_row_;
};

}  // namespace
}  // namespace hybrid_ep
