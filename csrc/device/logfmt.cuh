// LogFMT-10 for rows of combine: bit for bit the arithmetic of hybrid_ep/core/logfmt.py, which defines it.
//
//     a row of H channels: lower bytes of the codes [H] │ sign and top bit of each, four to a byte [H/4] │ headers
//     [H/128]
//
// A lane has eight channels, and sixteen lanes a header.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/bf16.cuh"
#include "device/lanes.cuh"

namespace hybrid_ep {

constexpr int kChannelsPerVector = 8;
constexpr int kVectorsPerHeader = 16;
constexpr int kMaxLogCode = 511;
constexpr float kMaxLogRange = 32.0f;

struct LogHeader {
  float low, step;
};
// The codes of eight channels: their lower bytes, and their two upper bits.
struct LogCodes {
  uint2 lower;
  uint32_t upper;  // 16 bits
};

// The addresses of the parts of eight channels: `vector` is their index in a row of `hidden` channels.
struct LogRow {
  uint8_t* row;
  int hidden;

  __device__ uint2* lower(int vector) const { return reinterpret_cast<uint2*>(row) + vector; }
  __device__ uint16_t* upper(int vector) const { return reinterpret_cast<uint16_t*>(row + hidden) + vector; }
  __device__ float2* header(int vector) const {
    return reinterpret_cast<float2*>(row + hidden + hidden / 4) + vector / kVectorsPerHeader;
  }
};

template <int kTerms>
__device__ __forceinline__ float polynomial(const float (&coefficients)[kTerms], float x) {
  float value = coefficients[0];
#pragma unroll
  for (int i = 1; i < kTerms; ++i) value = __fadd_rn(__fmul_rn(value, x), coefficients[i]);
  return value;
}

// The logarithm of a normal bf16 magnitude, of its bits.
__device__ __forceinline__ float log2_of(uint32_t magnitude) {
  constexpr float kLog2[] = {0x1.4fb6c0p-6f, -0x1.897cc6p-4f, 0x1.b9867cp-3f, -0x1.5b63c6p-2f,
                             0x1.e92bbep-2f, -0x1.713c3ep-1f, 0x1.715458p+0f};
  const float fraction = __fmul_rn(static_cast<float>(magnitude & 0x7fu), 0x1p-7f);
  const auto exponent = static_cast<float>(static_cast<int>(magnitude >> 7) - 127);
  return __fadd_rn(exponent, __fmul_rn(fraction, polynomial(kLog2, fraction)));
}

__device__ __forceinline__ uint32_t channel_bits(const uint4& channels, int i) {
  const uint32_t word = i < 2 ? channels.x : i < 4 ? channels.y : i < 6 ? channels.z : channels.w;
  return i % 2 == 0 ? word & 0xffffu : word >> 16;
}

// Collective over sixteen lanes; the whole warp must call it.
__device__ inline LogCodes cast_to_logfmt(const uint4& channels, LogHeader& header) {
  constexpr float kSteps = kMaxLogCode - 1, kHalfwayPerStep = 0x1.62e430p-4f;
  constexpr uint32_t kLeastNormal = 0x80, kNotFinite = 0x7f80, kMagnitude = 0x7fff;
  uint32_t largest = 0, smallest = kMagnitude;
#pragma unroll
  for (int i = 0; i < kChannelsPerVector; ++i) {
    const uint32_t magnitude = channel_bits(channels, i) & kMagnitude;
    if (magnitude >= kLeastNormal) {
      largest = max(largest, magnitude);
      smallest = min(smallest, magnitude);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kVectorsPerHeader; distance *= 2) {
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    smallest = min(smallest, __shfl_xor_sync(kAllLanes, smallest, distance));
  }
  const bool has_values = largest > 0, is_finite = largest < kNotFinite;
  const float top = log2_of(largest), least = log2_of(smallest), floor_of_range = __fadd_rn(top, -kMaxLogRange);
  const float low = has_values ? (least > floor_of_range ? least : floor_of_range) : 0.0f;
  const float spread = has_values ? __fadd_rn(top, -low) : 0.0f;
  const float step = __fdiv_rn(spread, kSteps), inverse = spread > 0 ? __fdiv_rn(kSteps, spread) : 0.0f;
  const float halfway = __fadd_rn(0.5f, -__fmul_rn(step, kHalfwayPerStep));
  header = {low, is_finite ? step : __uint_as_float(0x7fc00000u)};
  LogCodes codes{make_uint2(0, 0), 0};
#pragma unroll
  for (int i = 0; i < kChannelsPerVector; ++i) {
    const uint32_t bits = channel_bits(channels, i), magnitude = bits & kMagnitude;
    const float above = __fadd_rn(log2_of(magnitude), -low);
    const float nearest = floorf(__fadd_rn(__fmul_rn(above, inverse), halfway));
    uint32_t code = static_cast<uint32_t>(nearest < 0 ? 0.0f : nearest > kSteps ? kSteps : nearest) + 1;
    if (magnitude < kLeastNormal || above < -1.0f) code = 0;
    if (!is_finite) code = 1;
    (i < 4 ? codes.lower.x : codes.lower.y) |= (code & 0xffu) << (8 * (i % 4));
    codes.upper |= (code >> 8 | bits >> 15 << 1) << (2 * i);
  }
  return codes;
}

// Adds eight weighted channels to their sums, rounding as add_weighted does.
__device__ __forceinline__ void add_weighted(float (&sum)[8], const LogCodes& codes, const LogHeader& header,
                                             float weight) {
  constexpr float kExp2[] = {0x1.d52664p-10f, 0x1.2d5c5ep-7f, 0x1.c7f4aep-5f, 0x1.ebf194p-3f, 0x1.62e43ep-1f};
#pragma unroll
  for (int i = 0; i < kChannelsPerVector; ++i) {
    const uint32_t upper = codes.upper >> (2 * i);
    const uint32_t code = ((i < 4 ? codes.lower.x : codes.lower.y) >> (8 * (i % 4)) & 0xffu) | (upper & 1u) << 8;
    const float exponent =
        __fadd_rn(header.low, __fmul_rn(static_cast<float>(static_cast<int>(code) - 1), header.step));
    const float whole = floorf(exponent), fraction = __fadd_rn(exponent, -whole);
    const int power = whole == whole ? static_cast<int>(whole) + 127 : 127;
    const float magnitude = __fmul_rn(__fadd_rn(1.0f, __fmul_rn(fraction, polynomial(kExp2, fraction))),
                                      __uint_as_float(static_cast<uint32_t>(power) << 23));
    const float value = code == 0 ? 0.0f : magnitude;
    sum[i] = __fadd_rn(sum[i], __fmul_rn((upper & 2u) != 0 ? -value : value, weight));
  }
}

// Converts a segment of a bf16 row to LogFMT and stores it to the row's destination. `begin`: the segment's offset in
// the bf16 row, in bytes. Collective over the warp.
__device__ inline void send_as_logfmt(const uint8_t* segment, const LogRow& target, int begin, int num_bytes) {
  const int lane = threadIdx.x % 32, num_vectors = num_bytes / 16;
#pragma unroll 1
  for (int first = 0; first < num_vectors; first += 32) {
    const bool is_there = first + lane < num_vectors;
    const auto* vectors = reinterpret_cast<const uint4*>(segment) + first;
    LogHeader header;
    const LogCodes codes = cast_to_logfmt(is_there ? vectors[lane] : make_uint4(0, 0, 0, 0), header);
    if (!is_there) continue;
    const int vector = begin / 16 + first + lane;
    *target.lower(vector) = codes.lower;
    *target.upper(vector) = static_cast<uint16_t>(codes.upper);
    if (lane % kVectorsPerHeader == 0) *target.header(vector) = make_float2(header.low, header.step);
  }
  __syncwarp();
}

}  // namespace hybrid_ep
