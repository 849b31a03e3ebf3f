// Offsets of a route's parts in its memory, in int32. First come the parts that a combine and a cached dispatch read;
// their offsets depend only on tokens and ranks. Then comes what a new dispatch reports, last the kernel's scratch.
#pragma once

#include <cstdint>

#include "layout/offsets.h"

namespace hybrid_ep {

struct RouteLayout {
  int64_t rank_prefix;            // [R, R]; a route begins with it
  int64_t send_slot;              // [T, R]
  int64_t send_list;              // [R, T]
  int64_t dst_row;                // [T, R], expert-major only
  int64_t num_tokens_per_expert;  // [LE]; expert-major: [2, LE], with padding, then without
  int64_t returned_counts;        // [LE] int64, with padding, expert-major only
  int64_t overflow;               // [1], expert-major only
  int64_t topk_idx;               // [T, K] int64, as the caller gave them
  int64_t expert_row;             // [T, K], expert-major only
  int64_t num_ints;
};

// A route that is read has no experts and no top-k: LE = K = 0.
inline RouteLayout make_route_layout(int num_ranks, int num_tokens, int num_local_experts, int num_topk,
                                     bool is_permuted) {
  const int64_t cells = static_cast<int64_t>(num_tokens) * num_ranks;
  const int64_t columns = static_cast<int64_t>(num_tokens) * num_topk;
  RouteLayout layout{};
  Offsets offsets(sizeof(int64_t) / sizeof(int32_t));
  layout.rank_prefix = offsets.append(num_ranks * num_ranks);
  layout.send_slot = offsets.append(cells);
  layout.send_list = offsets.append(cells);
  layout.dst_row = offsets.append(is_permuted ? cells : 0);
  layout.num_tokens_per_expert = offsets.append((is_permuted ? 2 : 1) * num_local_experts);
  layout.returned_counts = offsets.append(is_permuted ? 2 * num_local_experts : 0);
  layout.overflow = offsets.append(is_permuted ? 1 : 0);
  layout.topk_idx = offsets.append(2 * columns);
  layout.expert_row = offsets.append(is_permuted ? columns : 0);
  layout.num_ints = offsets.end();
  return layout;
}

}  // namespace hybrid_ep
