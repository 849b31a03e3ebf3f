// bf16 to e2m1 with one scale for 16 channels: bit for bit the arithmetic of hybrid_ep/quantize.py.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "device/bf16.cuh"

namespace hybrid_ep {

constexpr float kE2m1Max = 6.0f;
constexpr uint32_t kE4m3Nan = 0x7f, kUe8m0Nan = 0xff;

// The scale of a block: its byte, and the factor for its channels.
struct BlockScale {
  uint32_t byte;
  float inverse;  // 0 where every channel becomes 0
};

__device__ __forceinline__ BlockScale make_block_scale(uint32_t amax_bits, float global_scale, bool ue8m0) {
  const float wanted = __fdiv_rn(__fmul_rn(__uint_as_float(amax_bits << 16), global_scale), kE2m1Max);
  uint32_t byte, nan;
  float scale;
  if (ue8m0) {
    constexpr uint32_t kMost = 0x7f000000u;  // 2¹²⁷
    nan = kUe8m0Nan;
    byte = wanted != wanted ? nan : (min(__float_as_uint(wanted), kMost) + 0x7fffffu) >> 23;
    scale = __uint_as_float(byte << 23);
  } else {
    nan = kE4m3Nan;
    byte = __nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3);
    scale = byte < 8 ? __fmul_rn(static_cast<float>(byte), 0x1p-9f) : __uint_as_float((byte << 20) + (120u << 23));
  }
  const float inverse = __fdiv_rn(global_scale, scale);
  const bool is_finite = (__float_as_uint(inverse) & 0x7f800000u) != 0x7f800000u;
  return {byte, byte != nan && is_finite ? inverse : 0.0f};
}

// Ties go to the neighbour whose mantissa is even; a NaN becomes 0.
__device__ __forceinline__ uint32_t round_to_e2m1(float value) {
  const float magnitude = fabsf(value);
  return (value < 0 ? 8u : 0u) + (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) +
         (magnitude >= 1.75f) + (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
}

// Eight channels as a word, the lowest in the lowest bits.
__device__ __forceinline__ uint32_t quantise_eight(const uint4& channels, float inverse) {
  const uint32_t words[4] = {channels.x, channels.y, channels.z, channels.w};
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes |= round_to_e2m1(__fmul_rn(bf16_low(words[i]), inverse)) << (8 * i);
    codes |= round_to_e2m1(__fmul_rn(bf16_high(words[i]), inverse)) << (8 * i + 4);
  }
  return codes;
}

}  // namespace hybrid_ep
