// Shares work items among the warps of a kernel: a warp that is done claims the next one. A fixed share would leave
// fast warps idle, because SMs do not get equal parts of the wire.
//
//     counter in global memory ─ atomic ─► 0, 1, 2, … each to one warp, in the order in which warps ask
#pragma once

#include "device/lanes.cuh"
#include "device/ptx/memory.cuh"

namespace hybrid_ep {

// An atomic takes as long as a load, so kAhead work indices are always in flight.
template <int kAhead = 1>
class WorkIndices {
 public:
  // Collective over a warp, as take() is. `counter` is 0 before the kernel begins, `first` the first index.
  __device__ explicit WorkIndices(uint32_t* counter, int first = 0) : counter_(counter), first_(first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) asked_[i] = ask();
  }

  __device__ int take() {
    const int index = first_ + __shfl_sync(kAllLanes, asked_[0], 0);
#pragma unroll
    for (int i = 1; i < kAhead; ++i) asked_[i - 1] = asked_[i];
    asked_[kAhead - 1] = ask();
    return index;
  }

 private:
  __device__ int ask() const {
    return threadIdx.x % 32 == 0 ? static_cast<int>(ptx::increment_relaxed_gpu(counter_)) : 0;
  }

  uint32_t* counter_;
  int first_;
  int asked_[kAhead];
};

}  // namespace hybrid_ep
