// The conversions to e4m3 of csrc/device.
#pragma once

#include "cuda_runtime.h"

enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

inline uint8_t round_to_e4m3(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7f;
  if (magnitude >= 448.0f) return sign | 0x7e;
  if (magnitude == 0.0f) return sign;
  int exponent;
  std::frexp(magnitude, &exponent);
  const int scale = std::max(exponent - 1, -6) - 3;  // of the last of three bits
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -scale)));
  return sign | static_cast<uint8_t>(steps + ((scale + 9) << 3));
}
inline uint8_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t, __nv_fp8_interpretation_t) {
  return round_to_e4m3(value);
}
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 value, __nv_saturation_t, __nv_fp8_interpretation_t) {
  return static_cast<uint16_t>(round_to_e4m3(value.x) | round_to_e4m3(value.y) << 8);
}
