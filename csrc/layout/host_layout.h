// The dispatch layout on the CPU: which rank gets which token, and how many.
#pragma once

#include <cstdint>

#include "layout/expert_map.h"

namespace hybrid_ep {

// All arrays are row-major and contiguous; T tokens, K top-k, R ranks, E experts.
struct HostLayout {
  const int64_t* topk_idx;  // [T, K] in; −1 = no expert
  int64_t num_tokens;       // T
  int64_t num_topk;         // K
  ExpertMap experts;
  int32_t* num_tokens_per_rank;    // [R] out
  int32_t* num_tokens_per_expert;  // [E] out; an expert named twice by a token counts twice
  bool* is_token_in_rank;          // [T, R] out
};

// Fills the three outputs. Returns the position in topk_idx of the first index outside [−1, E), or −1 if all are
// inside; the outputs are then undefined. Called by one thread; concurrent calls on other outputs are safe.
int64_t compute_layout(const HostLayout& layout);

}  // namespace hybrid_ep
