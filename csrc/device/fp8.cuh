// bf16 to e4m3 with one scale for 128 channels: bit for bit the arithmetic of hybrid_ep/quantize.py.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "device/bf16.cuh"
#include "device/lanes.cuh"

namespace hybrid_ep {

constexpr float kE4m3Max = 448.0f;
constexpr float kMinAmax = 1e-4f;
constexpr int kChannelsPerLane = 16;  // a lane quantises 16 channels, and eight lanes share a scale

struct Fp8Scale {
  float scale, inverse;
};

// The largest magnitude of the 128 channels of the eight lanes that share a scale. Collective over the warp.
__device__ __forceinline__ uint32_t find_amax_bits(const uint4 (&channels)[2]) {
  uint32_t most = find_amax_bits(channels[0], channels[1]);
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, distance));
  }
  return most;
}

__device__ __forceinline__ Fp8Scale make_scale(uint32_t amax_bits, bool power_of_two) {
  float amax = __uint_as_float(amax_bits << 16);
  amax = amax < kMinAmax ? kMinAmax : amax;  // not fmaxf, which would drop a NaN
  const float scale = __fdiv_rn(amax, kE4m3Max);
  // NOTE: torch computes number / tensor as reciprocal × number, which rounds twice. So does this.
  if (!power_of_two) return {scale, __fmul_rn(__frcp_rn(amax), kE4m3Max)};
  constexpr uint32_t kInfinity = 0x7f800000u;  // also what a NaN becomes
  const float rounded = __uint_as_float((min(__float_as_uint(scale), kInfinity) + 0x7fffffu) & kInfinity);
  return {rounded, __fdiv_rn(1.0f, rounded)};
}

__device__ __forceinline__ uint32_t quantise_four(uint32_t first, uint32_t second, float inverse) {
  const float2 low = make_float2(__fmul_rn(bf16_low(first), inverse), __fmul_rn(bf16_high(first), inverse));
  const float2 high = make_float2(__fmul_rn(bf16_low(second), inverse), __fmul_rn(bf16_high(second), inverse));
  return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3)) |
         static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
}

__device__ __forceinline__ uint4 quantise(const uint4 (&channels)[2], float inverse) {
  return make_uint4(
      quantise_four(channels[0].x, channels[0].y, inverse), quantise_four(channels[0].z, channels[0].w, inverse),
      quantise_four(channels[1].x, channels[1].y, inverse), quantise_four(channels[1].z, channels[1].w, inverse));
}

}  // namespace hybrid_ep
