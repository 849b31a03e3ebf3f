// The lanes of a warp.
#pragma once

#include "layout/limits.h"

namespace hybrid_ep {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxRanksPerLane = (kMaxRanks + 31) / 32;

// A warp handles several tokens at once: each lane takes one column of one token's top-k.
struct TokenLanes {
  int num_tokens;     // at once
  int token, column;  // of this lane
  int first;          // lane of the token's first column
  unsigned before;    // lanes below this one
  unsigned mates;     // lanes of the same token; none for a spare lane

  __device__ explicit TokenLanes(int num_topk) {
    const int lane = threadIdx.x % 32;
    num_tokens = 32 / num_topk;
    token = lane / num_topk;
    column = lane % num_topk;
    first = lane - column;
    before = (1u << lane) - 1;
    mates = token < num_tokens ? kAllLanes >> (32 - num_topk) << first : 0;
  }
};

// Sorts the values of the lanes that are not −1, which all differ: lane i gets the i-th lowest, or −1 behind the last.
// Collective over the warp.
__device__ inline int sort_over_lanes(int value) {
  const unsigned present = __ballot_sync(kAllLanes, value >= 0);
  int order = 0, sorted = -1;
  for (unsigned left = present; left != 0; left &= left - 1) {
    order += __shfl_sync(kAllLanes, value, __ffs(left) - 1) < value;
  }
  for (unsigned left = present; left != 0; left &= left - 1) {
    const int holder = __ffs(left) - 1;
    const int position = __shfl_sync(kAllLanes, order, holder), held = __shfl_sync(kAllLanes, value, holder);
    if (position == static_cast<int>(threadIdx.x % 32)) sorted = held;
  }
  return sorted;
}

}  // namespace hybrid_ep
