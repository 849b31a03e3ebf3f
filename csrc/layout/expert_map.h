// Which rank owns an expert, for host and device alike: experts are dealt to ranks in equal, contiguous blocks.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace hybrid_ep {

struct ExpertMap {
  int num_experts;
  int num_ranks;

  HYBRID_EP_HOST_DEVICE int num_local_experts() const { return num_experts / num_ranks; }
  // NOTE: 32-bit division; on a GPU the 64-bit one costs more than the rest of a token's layout.
  HYBRID_EP_HOST_DEVICE int rank_of(int64_t expert_idx) const {
    return static_cast<int>(expert_idx) / num_local_experts();
  }
};

}  // namespace hybrid_ep
