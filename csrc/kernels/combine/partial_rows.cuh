// The sum at the source: each token's partial rows, as they arrive.
//
//     token ─► wait for its chunks ─► the partial row of each rank, ascending ─► fp32 sum ─► + bias ─► out[token]
//
// A work item is a token. If there are few tokens, it is one segment of a token.
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

  // Returns false also if a rank has not come.
  __device__ bool next(SourceWalk<kRanksPerLane, uint8_t>& walk) {
    const Domain& domain = params_.domain;
    const ControlBlock& own = *domain.control[domain.rank];
    const uint8_t* slot = domain.arena[domain.rank];
    const auto* slot_weights = reinterpret_cast<const float*>(slot + params_.slot.weights);
    while (ok_) {
      if (next_token_ >= params_.num_tokens) return false;
      token_ = next_token_;
      part_ = next_part_;
      const uint8_t* rows[kRanksPerLane];
      const float* weights[kRanksPerLane];
#pragma unroll
      for (int q = 0; q < kRanksPerLane; ++q) {
        const int r = threadIdx.x % 32 + 32 * q, index = indices_[q];
        rows[q] = nullptr;
        weights[q] = nullptr;
        if (index < 0) continue;
        const bool is_local = r == domain.rank;
        const int64_t row = static_cast<int64_t>(routes_.recv_base[r]) + index;
        const bool is_there = row < (is_local ? params_.num_rows : params_.slot.capacity);
        const uint32_t* flag = is_local ? nullptr : &own.chunk_epoch[r][index / kRowsPerChunk];
        if (kFromExperts && is_local && is_there) flag = &params_.experts.row_epoch[row];
        if (flag != nullptr) ok_ &= waiter_.until_equal(flag, epoch_, r, WaitTag::kPartialRows);
        if (!is_there) continue;
        rows[q] = (is_local ? params_.rows : slot + params_.slot.rows) + row * params_.row_bytes;
        weights[q] = (is_local ? params_.weights : slot_weights) + row * params_.num_weights;
      }
      ok_ = __all_sync(kAllLanes, ok_);
      if (!ok_) return false;
      __syncwarp();
      ptx::fence_global_for_bulk();  // lane 0 loads rows whose flags other lanes have waited for
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

  __device__ void finish(int) const {}

 private:
  // Claims the next token and begins to load its row offsets: for each rank that a lane serves, the offset among the
  // rows that this rank has sent there, or −1.
  __device__ void look_ahead() {
    const int item = items_.take();
    next_token_ = item / num_parts_;
    next_part_ = item % num_parts_;
    const int num_ranks = params_.domain.num_ranks;
#pragma unroll
    for (int q = 0; q < kRanksPerLane; ++q) {
      const int r = threadIdx.x % 32 + 32 * q;
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
  bool ok_ = true;
  int indices_[kRanksPerLane];
};

}  // namespace
}  // namespace hybrid_ep
