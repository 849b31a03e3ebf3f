// What this rank's experts, and its spare slots, have to do with a mapping; for the kernels that copy experts.
#pragma once

#include <cuda_runtime.h>

#include "device/lanes.cuh"
#include "device/replica_mapping.cuh"
#include "kernels/balance/copy_experts.h"

namespace hybrid_ep {
namespace {

// A list of entries of the mapping: their indices in the mapping, and the experts that they name.
struct Entries {
  int count;
  int16_t numbers[kMaxReplicas];
  int32_t experts[kMaxReplicas];
};
static_assert(kMaxReplicas <= 1 << 15);  // an entry is an int16_t

// The expert of an entry, or −1.
__device__ int expert_of(const CopyExpertsParams& params, int entry) {
  const int64_t expert = params.mapping[entry];
  return expert >= 0 && expert < params.domain.num_ranks * params.num_local ? static_cast<int>(expert) : -1;
}

// Lists those of `num` entries, from `first` on and cyclically, that name an expert which is_one(). Collective over a
// warp.
template <typename IsOne>
__device__ void collect(const CopyExpertsParams& params, int first, int num, IsOne&& is_one, Entries& entries) {
  const int lane = threadIdx.x % 32, num_entries = params.domain.num_ranks * params.num_slots;
  int count = 0;
  for (int i = 0; i < num; i += 32) {
    const int entry = (first + i + lane) % num_entries, expert = i + lane < num ? expert_of(params, entry) : -1;
    const bool is_listed = expert >= 0 && is_one(expert);
    const unsigned lanes = __ballot_sync(kAllLanes, is_listed);
    if (is_listed) {
      const int place = count + __popc(lanes & ((1u << lane) - 1));
      entries.numbers[place] = static_cast<int16_t>(entry);
      entries.experts[place] = expert;
    }
    count += __popc(lanes);
  }
  if (lane == 0) entries.count = count;
}

// Collective over a warp.
__device__ uint32_t checksum_of_mapping(const CopyExpertsParams& params) {
  uint32_t sum = 0;
  for (int i = threadIdx.x % 32; i < params.domain.num_ranks * params.num_slots; i += 32) {
    sum += checksum_part(i, params.mapping[i]);
  }
  return __reduce_add_sync(kAllLanes, sum);
}

// A chunk of an expert in its tensor.
struct Place {
  const ExpertTensor* tensor;
  int64_t offset;
  int num_bytes;
};
__device__ Place place_of(const CopyExpertsParams& params, int chunk, int chunk_bytes) {
  int t = 0;
  while (chunk >= params.end_chunk[t]) ++t;
  const ExpertTensor& tensor = params.tensors[t];
  const int before = t > 0 ? params.end_chunk[t - 1] : 0;
  const int64_t offset = static_cast<int64_t>(chunk - before) * chunk_bytes;
  return {&tensor, offset, static_cast<int>(min(static_cast<int64_t>(chunk_bytes), tensor.item_bytes - offset))};
}

}  // namespace
}  // namespace hybrid_ep
