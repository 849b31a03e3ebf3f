// The sum at the source: each token's partial rows, as they arrive.
//
//     token ─► wait for its chunks ─► the partial row of each rank, ascending ─► fp32 sum ─► + bias ─► out[token]
//
// A work item is a token. If there are few tokens, it is one segment of a token. A warp that holds rows which are not
// summed yet does not wait for others.
#pragma once

#include "device/work_index.cuh"
#include "kernels/combine/routes.cuh"
#include "kernels/combine/sum_rows.cuh"

namespace hybrid_ep {
namespace {

constexpr int kTokensPerWarp = 2;  // on average; with fewer, warps share tokens

// Of sum_rows. kRanksPerLane: 1 where a warp has a lane for every rank.
template <int kRanksPerLane, bool kFromExperts>
class PartialRows {
 public:
  static constexpr int kSourcesPerLane = kRanksPerLane;
  static constexpr bool kCopies = false;

  __device__ PartialRows(const CombineParams& params, const CombineRoutes& routes, const Waiter& waiter, uint32_t epoch,
                         int num_warps)
      : params_(params),
        routes_(routes),
        waiter_(waiter),
        epoch_(epoch),
        num_parts_(params.num_tokens < kTokensPerWarp * num_warps
                       ? (params.row_bytes + kSumSegmentBytes - 1) / kSumSegmentBytes
                       : 1),
        items_(&params.domain.control[params.domain.rank]->summed_tokens) {
    look_ahead();
  }

  __device__ int row() const { return token_; }
  __device__ int begin() const { return part_ * kSumSegmentBytes; }
  __device__ int end() const {
    return num_parts_ == 1 ? params_.row_bytes : min(begin() + kSumSegmentBytes, params_.row_bytes);
  }
  __device__ bool ok() const { return ok_; }
  __device__ bool is_done() const { return !ok_ || next_token_ >= params_.num_tokens; }

  __device__ bool next(SourceWalk<kRanksPerLane, uint8_t>& walk) {
    while (!is_done()) {
      if (!rows_are_here()) {
        if (num_open_ > 0 || !wait_for_rows()) return false;
      }
      __syncwarp();
      ptx::fence_global_for_bulk();  // lane 0 loads rows whose flags other lanes have seen
      token_ = next_token_;
      part_ = next_part_;
      const uint8_t* rows[kRanksPerLane];
      const float* weights[kRanksPerLane];
#pragma unroll
      for (int q = 0; q < kRanksPerLane; ++q) {
        rows[q] = nullptr;
        weights[q] = nullptr;
        if (!is_there(q)) continue;
        rows[q] = (is_local(q) ? params_.rows : slot() + params_.slot.rows) + row_of(q) * params_.row_bytes;
        weights[q] = (is_local(q) ? params_.weights : slot_weights()) + row_of(q) * params_.num_weights;
      }
      ++num_open_;
      look_ahead();
      if (params_.num_weights > 0 && part_ == 0) {
        sum_weights(SourceWalk<kRanksPerLane, float>(weights), params_.num_weights,
                    params_.out_weights + static_cast<int64_t>(token_) * params_.num_weights);
      }
      walk = SourceWalk<kRanksPerLane, uint8_t>(rows);
      if (!walk.is_done()) return true;
      store_nothing(*this, token_);
    }
    return false;
  }

  template <int kVectors>
  __device__ void store(int token, int offset, float (&sum)[kVectors][8]) const {
    store_with_bias(params_, token, offset, sum);
  }

  __device__ void finish(int) { --num_open_; }

 private:
  __device__ int rank_of(int q) const { return threadIdx.x % 32 + 32 * q; }
  __device__ bool is_local(int q) const { return rank_of(q) == params_.domain.rank; }
  __device__ const uint8_t* slot() const { return params_.domain.arena[params_.domain.rank]; }
  __device__ const float* slot_weights() const { return reinterpret_cast<const float*>(slot() + params_.slot.weights); }

  // The row of the next item from the lane's q-th rank: of x, or of the slot.
  __device__ int64_t row_of(int q) const { return static_cast<int64_t>(routes_.recv_base[rank_of(q)]) + indices_[q]; }
  __device__ bool is_there(int q) const {
    return indices_[q] >= 0 && row_of(q) < (is_local(q) ? params_.num_rows : params_.slot.capacity);
  }
  // What is raised once that row has come; nullptr: nothing to wait for.
  __device__ const uint32_t* flag_of(int q) const {
    if (indices_[q] < 0) return nullptr;
    if (is_local(q)) return kFromExperts && is_there(q) ? &params_.experts.row_epoch[row_of(q)] : nullptr;
    return &params_.domain.control[params_.domain.rank]->chunk_epoch[rank_of(q)][indices_[q] / kRowsPerChunk];
  }

  // Whether all rows of the next item have come. Acquires for each lane its own.
  __device__ bool rows_are_here() const {
    bool are_here = true;
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      const uint32_t* flag = flag_of(q);
      are_here &= flag == nullptr || ptx::load_acquire_system(flag) == epoch_;
    }
    return __all_sync(kAllLanes, are_here);
  }

  // Waits for them. Returns false if the wait is given up.
  __device__ bool wait_for_rows() {
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      const uint32_t* flag = flag_of(q);
      if (flag != nullptr) ok_ &= waiter_.until_equal(flag, epoch_, rank_of(q), WaitTag::kPartialRows);
    }
    ok_ = __all_sync(kAllLanes, ok_);
    return ok_;
  }

  // Claims the next token and begins to load its row offsets: for each rank that a lane serves, the offset among the
  // rows that this rank has sent there, or −1.
  __device__ void look_ahead() {
    const int item = items_.take();
    next_token_ = item / num_parts_;
    next_part_ = item % num_parts_;
    const int num_ranks = params_.domain.num_ranks;
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      const int r = rank_of(q);
      const int64_t cell = static_cast<int64_t>(next_token_) * num_ranks + r;
      indices_[q] = next_token_ < params_.num_tokens && r < num_ranks ? params_.send_slot[cell] : -1;
    }
  }

  const CombineParams& params_;
  const CombineRoutes& routes_;
  const Waiter& waiter_;
  const uint32_t epoch_;
  const int num_parts_;  // of a token
  WorkIndices<> items_;
  int token_ = -1, part_ = 0, next_token_, next_part_;
  int num_open_ = 0;  // items whose rows are not all summed
  bool ok_ = true;
  int indices_[kRanksPerLane];
};

}  // namespace
}  // namespace hybrid_ep
