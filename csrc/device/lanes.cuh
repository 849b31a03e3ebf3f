// The lanes of a warp.
#pragma once

#include "layout/limits.h"

namespace hybrid_ep {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxRanksPerLane = (kMaxRanks + 31) / 32;

// A warp looks at as many tokens at once as it has lanes for: each lane at one column of one token.
struct TokenLanes {
  int num_tokens;     // at once
  int token, column;  // of this lane
  int first;          // lane of the token's first column
  unsigned before;    // lanes below this one
  unsigned mates;     // lanes of the same token; none for a lane that is left over

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

}  // namespace hybrid_ep
