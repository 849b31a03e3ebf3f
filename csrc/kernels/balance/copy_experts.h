// Experts to the spare slots of ranks of a domain. Legend: R ranks, B spare slots of a rank, LE local experts.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/params.h"
#include "layout/limits.h"

namespace hybrid_ep {

// One tensor of all experts. It may have any alignment; what is aligned to 16 bytes moves faster.
struct ExpertTensor {
  const uint8_t* experts;  // [LE, item_bytes]
  uint8_t* spare;          // [B, item_bytes]
  int64_t item_bytes;

  int num_chunks() const { return static_cast<int>((item_bytes + kExpertChunkBytes - 1) / kExpertChunkBytes); }
};

struct CopyExpertsParams {
  Domain domain;
  const int64_t* mapping;  // [R, B] the expert in each spare slot; others than 0 … R × LE − 1: the slot stays as it is
  int num_slots, num_local;
  uint32_t sizes;  // arena_bits() | a checksum of all sizes
  int num_tensors;
  ExpertTensor tensors[kMaxExpertTensors];
  int end_chunk[kMaxExpertTensors];  // of the chunks of an expert, those of a tensor end here
  int first_chunk, num_chunks;       // of each expert, that this launch copies
  bool is_further;                   // not the first launch of the call
  bool is_paced;                     // warps limit their stores on the wire
};

// Chunks of each expert that one launch copies at most: what the staging memory of a rank and its flags hold.
inline int max_chunks_of_launch(int num_slots) { return kMaxChunksOfSource / std::max(num_slots, 1); }

// What the launch stages at each rank.
inline int64_t staged_bytes(int num_slots, int num_chunks) {
  return static_cast<int64_t>(num_slots) * num_chunks * kExpertChunkBytes;
}

// Allows the kernel its shared memory on the current device; once for each device.
void prepare_copy_experts();

// Launches on the stream and returns. Throws CudaError if the launch is refused.
void launch_copy_experts(const CopyExpertsParams& params, int num_sms, cudaStream_t stream);

}  // namespace hybrid_ep
