// Sums rows of bf16 in fp32, a warp per result, with two loads always on their way while a third is added: a lane's
// loads in flight are what bounds the rate of such a sum.
#pragma once

#include "device/bf16.cuh"

namespace hybrid_ep {

constexpr int kSumVectors = 4;  // 16-byte vectors of a lane in one segment
constexpr int kSumBuffers = 3;  // loads of a segment: two on their way, one being added; more would not fit registers
constexpr int kSumSegmentBytes = kSumVectors * 32 * 16;

// Collective over the warp. The result is cut into segments of kSumSegmentBytes; each is the sum of
// num_sources rows in order, starting from 0.
//   load(segment, source, vectors)   reads a lane's share of a source's segment; called in order, sources innermost
//   store(segment, sum)              takes the sums of a lane's share
template <typename Load, typename Store>
__device__ __forceinline__ void sum_pipelined(int num_segments, int num_sources, Load&& load, Store&& store) {
  uint4 buffers[kSumBuffers][kSumVectors];
  float sum[kSumVectors][8] = {};
  if (num_sources == 0) {
    for (int segment = 0; segment < num_segments; ++segment) store(segment, sum);
    return;
  }
  int load_segment = 0, load_source = 0;
  const auto load_next = [&](uint4(&vectors)[kSumVectors]) {
    if (load_segment >= num_segments) return;
    load(load_segment, load_source, vectors);
    if (++load_source == num_sources) {
      load_source = 0;
      ++load_segment;
    }
  };
#pragma unroll
  for (int b = 0; b < kSumBuffers - 1; ++b) load_next(buffers[b]);
  int segment = 0, source = 0;
  while (segment < num_segments) {
    // NOTE: unrolled, so that every buffer is a register: moving one that is still being loaded would wait for it.
#pragma unroll
    for (int b = 0; b < kSumBuffers; ++b) {
      if (segment >= num_segments) break;
      load_next(buffers[(b + kSumBuffers - 1) % kSumBuffers]);
#pragma unroll
      for (int v = 0; v < kSumVectors; ++v) add_bf16(sum[v], buffers[b][v]);
      if (++source < num_sources) continue;
      store(segment++, sum);
      source = 0;
#pragma unroll
      for (int v = 0; v < kSumVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[v][i] = 0;
      }
    }
  }
}

}  // namespace hybrid_ep
