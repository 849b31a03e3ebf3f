// The bf16 pair of csrc/device/bf16.cuh.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat162 {
  uint16_t x, y;
};

inline uint16_t round_to_bf16_bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {round_to_bf16_bits(low), round_to_bf16_bits(high)};
}
