// What a CTA of a dispatch knows about the routes of tokens. count.cuh, exchange.cuh and bases.cuh fill it in this
// order; report.cuh reports to the host.
//
// Every function of these files is collective over the CTA unless its comment says otherwise. A kernel begins with cold
// instruction caches, and code that runs once waits for each cache line. So short loops are not unrolled.
// Legend: T tokens, K top-k, E experts, R ranks.
#pragma once

#include "device/ptx/memory.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace hybrid_ep {
namespace {

constexpr int kWarps = kDispatchThreads / 32;

// What a CTA knows about the call once the counts are exchanged.
struct DispatchRoutes {
  int warp_counts[kWarps][kMaxRanks];          // tokens per rank; turned into exclusive sums over warps
  int cta_base[kMaxRanks];                     // tokens to r in the CTAs before
  int cta_count[kMaxRanks];                    // tokens to r in this CTA
  int call[kMaxRanks][CountRow::kFirstField];  // what r has published of its call
  int other_column[kMaxRanks];  // the first column in which r's call differs; kNumCallColumns if none does
  int recv_base[kMaxRanks];     // this rank's first row at r
  int num_recv[kMaxRanks];      // rows that r receives
  int sent[kMaxRanks];          // tokens from this rank to r
  int needed[kMaxRanks];        // rows that r's slot must hold
  uint8_t* slot[kMaxRanks];     // r's slot, as this rank maps it
  int num_sending_ctas;         // up to the last CTA with a token that goes to any rank
};

struct Range {
  int begin, end;
};

// `total` × num_parts is below 2³¹.
__device__ Range share_of(int total, int part, int num_parts) {
  return {total * part / num_parts, total * (part + 1) / num_parts};
}

// Dynamic shared memory: expert counters while routes are made, then the rings.
__device__ int* warp_expert_counts(uint8_t* shared, int warp, int num_experts) {
  return reinterpret_cast<int*>(shared) + warp * num_experts;
}

__device__ int sum_over_ctas(const ControlBlock& own, int column, int num_ctas) {
  int sum = 0;
#pragma unroll 16
  for (int c = 0; c < num_ctas; ++c) sum += __ldcg(&own.cta_counts[c][column]);
  return sum;
}

}  // namespace
}  // namespace hybrid_ep
