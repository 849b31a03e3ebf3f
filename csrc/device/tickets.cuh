// How the warps of a kernel share work of which nobody knows how long it takes: SMs do not get equal parts of the wire.
//
//     counter in global memory ─ atomic ─► 0, 1, 2, … each to one warp, in the order in which warps ask
#pragma once

#include "device/lanes.cuh"
#include "device/ptx/memory.cuh"

namespace hybrid_ep {

class Tickets {
 public:
  // Collective over a warp, as take() is. `counter` is 0 before the kernel begins, `first` the first ticket.
  __device__ explicit Tickets(uint32_t* counter, int first = 0) : counter_(counter), first_(first) { ask(); }

  __device__ int take() {
    const int ticket = first_ + __shfl_sync(kAllLanes, asked_, 0);
    ask();
    return ticket;
  }

 private:
  // One is always on its way, because an atomic takes as long as a load.
  __device__ void ask() {
    if (threadIdx.x % 32 == 0) asked_ = static_cast<int>(ptx::add_relaxed_gpu(counter_, 1));
  }

  uint32_t* counter_;
  int first_;
  int asked_ = 0;
};

}  // namespace hybrid_ep
