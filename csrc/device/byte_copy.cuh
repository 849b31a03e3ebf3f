// Copies by a warp, of bytes of any alignment. The bulk copy engine takes multiples of 16 only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hybrid_ep {

// Whether the bulk copy engine can read, or write, so many bytes here.
__device__ inline bool is_aligned_for_bulk(const void* address, int num_bytes) {
  return ((reinterpret_cast<uintptr_t>(address) | static_cast<uintptr_t>(num_bytes)) & 15) == 0;
}

// Copies from global to shared memory or back. Collective over the warp.
__device__ inline void copy_bytes(uint8_t* target, const uint8_t* source, int num_bytes) {
  const int lane = threadIdx.x % 32;
  const auto copy = [&](auto* to, const auto* from) {
    const int count = num_bytes / static_cast<int>(sizeof(*to));
#pragma unroll 4
    for (int i = lane; i < count; i += 32) to[i] = from[i];
  };
  const uintptr_t bits =
      reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source) | static_cast<uintptr_t>(num_bytes);
  if ((bits & 3) == 0) {
    copy(reinterpret_cast<uint32_t*>(target), reinterpret_cast<const uint32_t*>(source));
  } else {
    copy(target, source);
  }
}

}  // namespace hybrid_ep
