// Counts the tokens for each rank and expert, and finds each token's row offset among them. Legend: routes.cuh.
#pragma once

#include "device/lanes.cuh"
#include "device/refuse.cuh"
#include "device/wait.cuh"
#include "kernels/dispatch/routes.cuh"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kStepsPerBatch = 4;  // for which a lane loads its expert at once

// Finds each token's row offset among the tokens of its warp for the same rank, and for the same expert.
__device__ void count_tokens(const DispatchParams& params, const Range tokens, DispatchRoutes& routes,
                             uint8_t* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_ranks = params.domain.num_ranks, num_topk = params.num_topk;
  const ExpertMap experts{params.num_experts, num_ranks};
  const TokenLanes lanes(num_topk);
  int* rank_counts = routes.warp_counts[warp];
  int* expert_counts = warp_expert_counts(shared, warp, params.num_experts);

  const auto is_there = [&](int token) { return lanes.mates != 0 && token < tokens.end; };
  // A batch of loads is in flight while the batch before is counted.
  const auto load_experts = [&](int first, int64_t (&experts_of)[kStepsPerBatch]) {
#pragma unroll
    for (int i = 0; i < kStepsPerBatch; ++i) {
      const int token = first + i * lanes.num_tokens + lanes.token;
      const int64_t cell = static_cast<int64_t>(token) * num_topk + lanes.column;
      experts_of[i] = is_there(token) ? params.topk_idx[cell] : -1;
    }
  };
  const auto count_step = [&](int token, int64_t expert) {
    const int64_t cell = static_cast<int64_t>(token) * num_topk + lanes.column;
    if (is_there(token)) params.kept_topk_idx[cell] = expert;
    if (expert < -1 || expert >= params.num_experts) {
      refuse_expert(*params.domain.control[params.domain.rank], expert);
      expert = -1;
    }
    const unsigned same_expert = __match_any_sync(kAllLanes, static_cast<int>(expert));
    const bool is_expert = expert >= 0;
    const int rank = is_expert ? experts.rank_of(expert) : -1;
    const unsigned same_rank = __match_any_sync(kAllLanes, rank);
    const bool is_leader = is_expert && (same_rank & lanes.mates & lanes.before) == 0;
    const unsigned crossings = __ballot_sync(kAllLanes, is_leader) & same_rank;
    const int row_offset = is_expert ? expert_counts[expert] + __popc(same_expert & lanes.before) : -1;
    const int slot = is_leader ? rank_counts[rank] + __popc(crossings & lanes.before) : -1;
    __syncwarp();
    // The last of the lanes with the same destination.
    if (is_expert && same_expert >> lane == 1) expert_counts[expert] = row_offset + 1;
    if (is_leader && crossings >> lane == 1) rank_counts[rank] = slot + 1;
    __syncwarp();
    if (is_leader) params.send_slot[static_cast<int64_t>(token) * num_ranks + rank] = slot;
    if (params.pad_multiple > 0 && is_there(token)) params.expert_row[cell] = row_offset;
  };
  int64_t batch[kStepsPerBatch], next[kStepsPerBatch];
  const int tokens_per_batch = kStepsPerBatch * lanes.num_tokens;
  load_experts(tokens.begin, batch);
#pragma unroll 1
  for (int r = lane; r < num_ranks; r += 32) rank_counts[r] = 0;
#pragma unroll 1
  for (int e = lane; e < params.num_experts; e += 32) expert_counts[e] = 0;
  const int64_t first_cell = static_cast<int64_t>(tokens.begin) * num_ranks;
  const int num_cells = (tokens.end - tokens.begin) * num_ranks;
#pragma unroll 1
  for (int i = lane; i < num_cells; i += 32) params.send_slot[first_cell + i] = -1;
#pragma unroll 1
  for (int i = lane; i < num_cells && params.pad_multiple > 0; i += 32) params.dst_row[first_cell + i] = -1;
  __syncwarp();
  for (int first = tokens.begin; first < tokens.end; first += tokens_per_batch) {
    load_experts(first + tokens_per_batch, next);
#pragma unroll 1
    for (int i = 0; i < kStepsPerBatch; ++i) {
      const int step = first + i * lanes.num_tokens;
      if (step < tokens.end) count_step(step + lanes.token, batch[0]);
#pragma unroll
      for (int j = 1; j < kStepsPerBatch; ++j) batch[j - 1] = batch[j];
    }
#pragma unroll
    for (int i = 0; i < kStepsPerBatch; ++i) batch[i] = next[i];
  }
}

// Turns the warps' counts into exclusive sums and publishes the CTA's totals to the grid.
__device__ void sum_over_warps(const DispatchParams& params, DispatchRoutes& routes, uint8_t* shared) {
  ControlBlock& own = *params.domain.control[params.domain.rank];
  const int num_ranks = params.domain.num_ranks;
  for (int i = threadIdx.x; i < num_ranks + params.num_experts; i += kDispatchThreads) {
    int sum = 0;
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) {
      int& count =
          i < num_ranks ? routes.warp_counts[w][i] : warp_expert_counts(shared, w, params.num_experts)[i - num_ranks];
      const int warp_count = count;
      count = sum;
      sum += warp_count;
    }
    own.cta_counts[blockIdx.x][i] = sum;
    if (i < num_ranks) routes.cta_count[i] = sum;
  }
}

}  // namespace
}  // namespace hybrid_ep
