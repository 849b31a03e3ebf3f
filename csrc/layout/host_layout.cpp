#include "layout/host_layout.h"

#include <algorithm>

namespace hybrid_ep {

int64_t compute_layout(const HostLayout& layout) {
  const ExpertMap& experts = layout.experts;
  std::fill_n(layout.num_tokens_per_rank, experts.num_ranks, 0);
  std::fill_n(layout.num_tokens_per_expert, experts.num_experts, 0);
  std::fill_n(layout.is_token_in_rank, layout.num_tokens * experts.num_ranks, false);
  for (int64_t token = 0; token < layout.num_tokens; ++token) {
    const int64_t* row = layout.topk_idx + token * layout.num_topk;
    bool* in_rank = layout.is_token_in_rank + token * experts.num_ranks;
    for (int64_t k = 0; k < layout.num_topk; ++k) {
      const int64_t expert = row[k];
      if (expert < -1 || expert >= experts.num_experts) return token * layout.num_topk + k;
      if (expert < 0) continue;
      ++layout.num_tokens_per_expert[expert];
      bool& seen = in_rank[experts.rank_of(expert)];
      if (!seen) ++layout.num_tokens_per_rank[experts.rank_of(expert)];
      seen = true;
    }
  }
  return -1;
}

}  // namespace hybrid_ep
