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
  // Of push_experts. This rank sees the spare slots of rank r at peers[r] + peer_offset, aligned to 16 bytes as is
  // item_bytes.
  uint8_t* const* peers = nullptr;  // [R]
  int64_t peer_offset = 0;

  int num_chunks(int chunk_bytes) const { return static_cast<int>((item_bytes + chunk_bytes - 1) / chunk_bytes); }
};

struct CopyExpertsParams {
  Domain domain;
  const int64_t* mapping;  // [R, B] the expert in each spare slot; others than 0 … R × LE − 1: the slot stays as it is
  int num_slots, num_local;
  uint32_t sizes;  // arena_bits() | a checksum of all sizes, and of where the spare slots are
  int num_tensors;
  ExpertTensor tensors[kMaxExpertTensors];
  int end_chunk[kMaxExpertTensors];  // of the chunks of an expert, those of a tensor end here
  int first_chunk, num_chunks;       // of each expert, that this launch copies
  bool is_further;                   // not the first launch of the call
  bool is_paced;                     // warps limit their stores on the wire
};

// Chunks of each expert that one launch copies at most: what the staging memory of a rank and its flags hold.
inline int max_chunks_of_launch(int num_slots) { return kMaxChunksOfSource / std::max(num_slots, 1); }

constexpr int kPushedChunkBytes = 4096;
// Of push_experts: work indices count the chunks of all replicas.
constexpr int kMaxPushedChunks = (1 << 30) / kMaxReplicas;

// What a launch stages at each rank.
inline int64_t staged_bytes(int num_slots, int num_chunks) {
  return static_cast<int64_t>(num_slots) * num_chunks * kExpertChunkBytes;
}

// Allow the kernels their shared memory on the current device; once for each device.
void prepare_copy_experts();
void prepare_push_experts();

// Each launches on the stream and returns. Throws CudaError if the launch is refused. push_experts is for spare slots
// that peers can write, copy_experts for others.
void launch_copy_experts(const CopyExpertsParams& params, int num_sms, cudaStream_t stream);
void launch_push_experts(const CopyExpertsParams& params, int num_sms, cudaStream_t stream);

}  // namespace hybrid_ep
