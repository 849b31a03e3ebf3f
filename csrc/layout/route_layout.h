// Offsets of a route's parts in its memory, in int32. First come the parts that a combine and a cached dispatch read;
// their offsets depend only on tokens and ranks. Then comes what a new dispatch reports, last the kernel's scratch.
#pragma once

#include <cstdint>

namespace hybrid_ep {

struct RouteLayout {
  int64_t rank_prefix;            // [R, R]; a route begins with it
  int64_t send_slot;              // [T, R]
  int64_t send_list;              // [R, T]
  int64_t dst_row;                // [T, R], expert-major only
  int64_t num_tokens_per_expert;  // [LE]; expert-major: [2, LE], with padding, then without
  int64_t overflow;               // [1], expert-major only
  int64_t expert_place;           // [T, K]
  int64_t num_ints;
};

// A route that is read has no experts and no top-k: LE = K = 0.
inline RouteLayout make_route_layout(int num_ranks, int num_tokens, int num_local_experts, int num_topk,
                                     bool is_permuted) {
  const int64_t cells = static_cast<int64_t>(num_tokens) * num_ranks;
  RouteLayout layout{};
  int64_t offset = 0;
  const auto place = [&](int64_t num_ints) {
    const int64_t begin = offset;
    offset += num_ints;
    return begin;
  };
  layout.rank_prefix = place(num_ranks * num_ranks);
  layout.send_slot = place(cells);
  layout.send_list = place(cells);
  layout.dst_row = place(is_permuted ? cells : 0);
  layout.num_tokens_per_expert = place((is_permuted ? 2 : 1) * num_local_experts);
  layout.overflow = place(is_permuted ? 1 : 0);
  layout.expert_place = place(static_cast<int64_t>(num_tokens) * num_topk);
  layout.num_ints = offset;
  return layout;
}

}  // namespace hybrid_ep
