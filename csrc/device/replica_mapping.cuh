// The mapping of experts to spare slots, and rows of experts. hybrid_ep/buffers/expert_moves.py has the checksum in
// torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hybrid_ep {

// What an entry of the mapping adds to a sum, of which the upper 31 bits are the checksum. Each entry is mixed for
// itself, so that changes of several do not cancel out.
__device__ inline uint32_t checksum_part(int entry, int64_t expert) {
  uint32_t mixed = static_cast<uint32_t>(expert) * 0x9e3779b1u + static_cast<uint32_t>(entry) * 0x85ebca77u;
  mixed = (mixed ^ mixed >> 15) * 0x2c1b3c6du;
  mixed = (mixed ^ mixed >> 12) * 0x297a2d39u;
  return mixed ^ mixed >> 15;
}

// Zeroes this rank's rows of a failed call, of which no rank has sent any: a caller may add them to gradients before
// its host knows of the failure. `num_bytes` is a multiple of 16. Collective over the grid.
__device__ inline void clear_rows(uint8_t* rows, int64_t num_bytes) {
  auto* vectors = reinterpret_cast<uint4*>(rows);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_bytes / 16; i += step) {
    vectors[i] = uint4{};
  }
}

}  // namespace hybrid_ep
