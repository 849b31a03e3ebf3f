// A warp's ring of stages in shared memory. Rows, or pieces of rows, come in by bulk loads. They leave by bulk stores
// of all lanes, or are read in place.
//
//     fetch(row i + S − kInFlight) ─► stage ─► wait(i) ─► each lane stores to its destination ─► release(i)
//
// Lane 0 loads. Every lane may store, and waits for its own stores. A stage is loaded again kInFlight rows later, when
// the stores of its row have read it. So kInFlight rows are being stored while the others are being loaded. With 0
// there are no stores.
#pragma once

#include "device/byte_copy.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/row_ring_limits.h"

namespace hybrid_ep {

template <int kInFlight>
class RowRing {
 public:
  // Collective over the warp. `stages` has num_stages of row_bytes; `barriers` one barrier for each.
  __device__ RowRing(uint8_t* stages, uint64_t* barriers, int num_stages, int row_bytes, int lane)
      : memory_(stages),
        stages_(ptx::shared_address(stages)),
        barriers_(ptx::shared_address(barriers)),
        num_stages_(num_stages),
        row_bytes_(row_bytes),
        lane_(lane) {
    if (lane_ == 0) {
#pragma unroll 4  // runs once, with cold instruction caches
      for (int i = 0; i < num_stages_; ++i) ptx::barrier_init(barrier_of(i), 1);
      ptx::fence_barrier_init();
    }
    __syncwarp();
  }

  __device__ int num_ahead() const { return num_stages_ - kInFlight; }

  // Lane 0 begins to load a row; the others do nothing. At most num_ahead() rows may be fetched and not yet released.
  __device__ void fetch(const uint8_t* row) { fetch(row, row_bytes_); }

  // Lane 0 begins to load num_bytes, at most a stage.
  __device__ void fetch(const uint8_t* from, int num_bytes) {
    if (lane_ == 0) {
      ptx::barrier_expect(barrier_of(load_stage_), num_bytes);
      ptx::bulk_load(stages_ + load_stage_ * row_bytes_, from, num_bytes, barrier_of(load_stage_));
    }
    if (++load_stage_ == num_stages_) load_stage_ = 0;
  }

  // Fills the next stage by ordinary loads of all lanes, from an address that the copy engine cannot load from.
  __device__ void fill(const uint8_t* from, int num_bytes) {
    copy_bytes(memory_ + load_stage_ * row_bytes_, from, num_bytes);
    ptx::fence_shared_for_bulk();
    __syncwarp();
    if (lane_ == 0) ptx::barrier_expect(barrier_of(load_stage_), 0);
    if (++load_stage_ == num_stages_) load_stage_ = 0;
  }

  // Stages of the next row to fetch, of the next to wait for, and of the one after it.
  __device__ int load_stage() const { return load_stage_; }
  __device__ int stage() const { return stage_; }
  __device__ int next_stage() const { return stage_ + 1 == num_stages_ ? 0 : stage_ + 1; }

  // Waits for the next row and returns its address.
  __device__ uint8_t* wait() const {
    ptx::barrier_wait(barrier_of(stage_), parity_);
    return memory_ + stage_ * row_bytes_;
  }

  // Ends the row: the calling lane's stores of it become one group. Then one more row may be fetched.
  __device__ void release() {
    if constexpr (kInFlight > 0) {
      ptx::bulk_commit();
      ptx::bulk_wait_read<kInFlight>();
    }
    __syncwarp();
    if (++stage_ == num_stages_) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // Waits for rows that are fetched and not wanted: shared memory has to outlive their loads.
  __device__ void drop(int num_rows) {
    for (; num_rows > 0; --num_rows) {
      wait();
      release();
    }
  }

 private:
  __device__ ptx::SharedAddress barrier_of(int stage) const {
    return barriers_ + stage * static_cast<int>(sizeof(uint64_t));
  }

  uint8_t* memory_;
  ptx::SharedAddress stages_, barriers_;
  int num_stages_, row_bytes_, lane_;
  int load_stage_ = 0;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace hybrid_ep
