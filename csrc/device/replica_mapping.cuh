// The mapping of experts to spare slots.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hybrid_ep {

// What an entry of the mapping adds to the checksum, which is the upper 31 bits of the sum: no rank needs another's
// mapping to find out that they differ. Each entry is mixed for itself, so that changes of two do not cancel out.
__device__ inline uint32_t checksum_part(int entry, int64_t expert) {
  uint32_t mixed = static_cast<uint32_t>(expert) * 0x9e3779b1u + static_cast<uint32_t>(entry) * 0x85ebca77u;
  mixed = (mixed ^ mixed >> 15) * 0x2c1b3c6du;
  mixed = (mixed ^ mixed >> 12) * 0x297a2d39u;
  return mixed ^ mixed >> 15;
}

}  // namespace hybrid_ep
