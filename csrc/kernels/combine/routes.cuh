// Where the rows of a combine are, and where they go.
#pragma once

#include "device/wait.cuh"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

struct CombineRoutes {
  int send_begin[kMaxRanks];  // first row of x that belongs to source i
  int send_count[kMaxRanks];  // rows of x that belong to source i
  int send_base[kMaxRanks];   // first row of this rank in i's arena
  int recv_base[kMaxRanks];   // first row of rank j in this rank's arena; this rank's own in x
  int max_count;              // most rows of x that belong to one source
};

// Fills the routes from the matrix of counts. Every rank has the matrix, so nothing is exchanged. Collective over the
// CTA; `prefix` is scratch for the matrix.
__device__ void find_combine_bases(const CombineParams& params, CombineRoutes& routes, int32_t* prefix) {
  const int me = params.domain.rank, num_ranks = params.domain.num_ranks;
  for (int i = threadIdx.x; i < num_ranks * num_ranks; i += blockDim.x) prefix[i] = params.rank_prefix[i];
  if (threadIdx.x == 0) routes.max_count = 0;
  __syncthreads();
  const auto count = [&](int from, int to) {
    return prefix[from * num_ranks + to] - (from > 0 ? prefix[(from - 1) * num_ranks + to] : 0);
  };
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    routes.send_begin[r] = r > 0 ? prefix[(r - 1) * num_ranks + me] : 0;
    routes.send_count[r] = count(r, me);
    atomicMax(&routes.max_count, routes.send_count[r]);
    // A source holds the partial rows of the other ranks in ascending rank order.
    int send_base = 0, recv_base = 0;
    for (int j = 0; j < me; ++j) send_base += j == r ? 0 : count(r, j);
    for (int j = 0; j < r; ++j) recv_base += j == me ? 0 : count(me, j);
    routes.send_base[r] = send_base;
    routes.recv_base[r] = r == me ? routes.send_begin[r] : recv_base;
    // Only an arena that was sized by a bound can be too small. Every rank sees and reports that.
    if (blockIdx.x != 0) continue;
    int num_partial = 0;
    for (int j = 0; j < num_ranks; ++j) num_partial += j == r ? 0 : count(r, j);
    if (num_partial > params.slot.capacity) {
      report_fault(params.domain.fault, FaultKind::kOverflow, KernelName::kCombine, WaitTag::kPartialRows, me, r,
                   params.slot.capacity, num_partial);
    }
  }
  __syncthreads();
}

}  // namespace
}  // namespace hybrid_ep
