// bf16 pairs in a 32-bit word, to fp32 and back.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace hybrid_ep {

// A bf16 is the upper half of the fp32 with the same value.
__device__ __forceinline__ float bf16_low(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// The largest magnitude of 16 channels, as bits of a bf16. Bits of magnitudes compare as integers, and a NaN is the
// largest.
__device__ __forceinline__ uint32_t find_amax_bits(const uint4& first, const uint4& second) {
  const uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, max(words[i] & 0x7fffu, (words[i] >> 16) & 0x7fffu));
  return most;
}

// Rounds eight sums to nearest even.
__device__ __forceinline__ uint4 round_to_bf16(const float (&sum)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Adds 16 bytes of bf16 to eight sums.
__device__ __forceinline__ void add_bf16(float (&sum)[8], const uint4& vector) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += bf16_low(words[i]);
    sum[2 * i + 1] += bf16_high(words[i]);
  }
}

// Adds a weighted row to eight sums. Product and sum round separately, as every engine does.
__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4& row, float weight) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(bf16_low(words[i]), weight));
    sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(bf16_high(words[i]), weight));
  }
}

}  // namespace hybrid_ep
