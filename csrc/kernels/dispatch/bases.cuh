// Computes the output row of each token from the counts of all ranks. Legend: routes.cuh.
#pragma once

#include "device/lanes.cuh"
#include "kernels/dispatch/exchange.cuh"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

// Finds the first row of this rank at each rank. Every CTA computes it. Returns whether all counts came.
// Expert-major: expert_base[e] becomes the row, at its rank, of this CTA's first copy for expert e.
__device__ bool find_dispatch_bases(const DispatchParams& params, const Waiter& waiter, uint32_t epoch,
                                    DispatchRoutes& routes, int* expert_base) {
  const Domain& domain = params.domain;
  const int num_ranks = domain.num_ranks, num_experts = params.num_experts;
  for (int r = threadIdx.x; r < num_ranks; r += kDispatchThreads) {
    routes.slot[r] = domain.arena[r] + routes.call[r][CountRow::kSlotIdx] * domain.slot_bytes;
    routes.needed[r] = routes.num_recv[r];
    if (params.topk_idx == nullptr) {
      const Range slots = share_of(routes.sent[r], blockIdx.x, gridDim.x);
      routes.cta_base[r] = slots.begin;
      routes.cta_count[r] = slots.end - slots.begin;
    }
  }
  if (params.topk_idx == nullptr || params.pad_multiple == 0) return true;

  int* block_rows = expert_base + num_experts;  // of each expert at its rank, without padding
  for (int e = threadIdx.x; e < num_experts; e += kDispatchThreads) {
    expert_base[e] = sum_over_ctas(*domain.control[domain.rank], num_ranks + e, blockIdx.x);
    block_rows[e] = 0;
  }
  __syncthreads();
  const auto add = [&](Cell cell, int count) {
    const int e = cell.column - CountRow::kTokensPerExpert;
    if (cell.source < domain.rank) atomicAdd(&expert_base[e], count);
    atomicAdd(&block_rows[e], count);
  };
  const bool ok = receive_columns(params, waiter, epoch, CountRow::kTokensPerExpert, num_experts, add);
  __syncthreads();
  const ExpertMap experts{num_experts, num_ranks};
  for (int r = threadIdx.x; r < num_ranks; r += kDispatchThreads) {
    int begin = 0;
    for (int l = 0; l < experts.num_local_experts(); ++l) {
      const int e = r * experts.num_local_experts() + l;
      expert_base[e] += begin;
      begin += (block_rows[e] + params.pad_multiple - 1) / params.pad_multiple * params.pad_multiple;
    }
    routes.needed[r] = begin;
  }
  return ok;
}

// Turns send_slot into the index among all tokens that this rank sends to r. Needs nothing from other ranks.
__device__ void finish_slots(const DispatchParams& params, const Range tokens, const DispatchRoutes& routes) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_ranks = params.domain.num_ranks;
  const int num_cells = (tokens.end - tokens.begin) * num_ranks;
#pragma unroll 1
  for (int cell = lane; cell < num_cells; cell += 32) {
    const int token = tokens.begin + cell / num_ranks, r = cell % num_ranks;
    int32_t& slot = params.send_slot[static_cast<int64_t>(token) * num_ranks + r];
    if (slot < 0) continue;
    slot += routes.cta_base[r] + routes.warp_counts[warp][r];
    params.send_list[static_cast<int64_t>(r) * params.num_tokens + slot] = token;
  }
}

// Expert-major output: turns row offsets among this warp's copies for an expert into rows at the expert's rank. A token
// crosses once to each rank, to the lowest of its rows there.
__device__ void finish_expert_rows(const DispatchParams& params, const Range tokens, uint8_t* shared,
                                   const int* expert_base) {
  const int warp = threadIdx.x / 32;
  const int num_ranks = params.domain.num_ranks, num_topk = params.num_topk;
  const ExpertMap experts{params.num_experts, num_ranks};
  const TokenLanes lanes(num_topk);
  const int* warp_experts = warp_expert_counts(shared, warp, params.num_experts);
  const auto load = [&](int token, int& row, int64_t& expert) {
    const int64_t cell = static_cast<int64_t>(token) * num_topk + lanes.column;
    const bool is_there = lanes.mates != 0 && token < tokens.end;
    row = is_there ? params.expert_row[cell] : -1;
    expert = is_there ? params.topk_idx[cell] : -1;
  };
  int row, next_row;
  int64_t expert, next_expert;
  load(tokens.begin + lanes.token, row, expert);
  for (int first = tokens.begin; first < tokens.end; first += lanes.num_tokens) {
    const int token = first + lanes.token;
    load(token + lanes.num_tokens, next_row, next_expert);
    int rank = -1;
    if (row >= 0) {
      rank = experts.rank_of(expert);
      row += expert_base[expert] + warp_experts[expert];
      params.expert_row[static_cast<int64_t>(token) * num_topk + lanes.column] = row;
    }
    const unsigned same_rank = __match_any_sync(kAllLanes, rank) & lanes.mates;
    int lowest = row;
    for (int k = 0; k < num_topk; ++k) {
      const int other_lane = (lanes.first + k) % 32, other = __shfl_sync(kAllLanes, row, other_lane);
      if (same_rank >> other_lane & 1) lowest = min(lowest, other);
    }
    if (rank >= 0 && (same_rank & lanes.before) == 0) {
      params.dst_row[static_cast<int64_t>(token) * num_ranks + rank] = lowest;
    }
    row = next_row;
    expert = next_expert;
  }
}

}  // namespace
}  // namespace hybrid_ep
