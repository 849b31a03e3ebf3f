// A warp that moves rows, one after the other, each to the targets of its lanes.
//
//     row ─ pieces by bulk load ─► stages ─ a bulk store per lane that has a target ─► memory of this or another GPU
#pragma once

#include "device/row_ring.cuh"

namespace hybrid_ep {

class RowMover {
 public:
  static constexpr int kPieceBytes = 4096, kStages = 3, kStoresInFlight = 1;
  static constexpr int kRingBytes = kStages * kPieceBytes;

  // Collective over the warp, as everything here. `stages` has kRingBytes, `barriers` kStages.
  __device__ RowMover(uint8_t* stages, uint64_t* barriers)
      : ring_(stages, barriers, kStages, kPieceBytes, threadIdx.x % 32) {}

  // Begins to copy a row to `target`, each lane's own or nullptr. When it returns the row has been read, and loads of
  // `next` are on their way: the row of the following call, of as many bytes, or nullptr.
  __device__ void move(const uint8_t* row, int row_bytes, uint8_t* target, const uint8_t* next = nullptr) {
    int asked_next = next == nullptr ? row_bytes : 0;
    const auto ask = [&] {
      for (; num_ahead_ < ring_.num_ahead() && (asked_ < row_bytes || asked_next < row_bytes); ++num_ahead_) {
        const bool is_next = asked_ >= row_bytes;
        int& asked = is_next ? asked_next : asked_;
        ring_.fetch((is_next ? next : row) + asked, min(kPieceBytes, row_bytes - asked));
        asked += kPieceBytes;
      }
    };
    ask();
    for (int offset = 0; offset < row_bytes; offset += kPieceBytes) {
      const uint8_t* stage = ring_.wait();
      if (target != nullptr) ptx::bulk_store(target + offset, stage, min(kPieceBytes, row_bytes - offset));
      ring_.release();
      --num_ahead_;
      ask();
    }
    asked_ = next == nullptr ? 0 : asked_next;
  }

  // Waits until every row is written at its targets.
  __device__ void finish() const {
    ptx::bulk_wait_written<0>();
    __syncwarp();
  }

 private:
  RowRing<kStoresInFlight> ring_;
  int num_ahead_ = 0;  // pieces that are on their way
  int asked_ = 0;      // bytes of the next row that are
};

}  // namespace hybrid_ep
