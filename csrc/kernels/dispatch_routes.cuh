// Where the tokens of a dispatch go: counts, their exchange, and the places that follow from them. Part of dispatch.cu.
//
// Every function is collective over the CTA unless it says otherwise. Legend: T tokens, K top-k, E experts, R ranks.
#pragma once

#include "device/lanes.cuh"
#include "device/ptx/memory.cuh"
#include "device/wait.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kWarps = kDispatchThreads / 32;
constexpr int kStepsPerBatch = 4;  // for which a lane loads its expert at once

// What a CTA knows about the call once the counts are exchanged.
struct Routes {
  int warp_counts[kWarps][kMaxRanks];  // tokens per rank; turned into exclusive sums over warps
  int cta_base[kMaxRanks];             // tokens to r in the CTAs before
  int cta_count[kMaxRanks];            // tokens to r in this CTA
  int recv_base[kMaxRanks];            // this rank's first row at r
  int row_limit[kMaxRanks];            // rows that r takes
  int sent[kMaxRanks];                 // tokens from this rank to r
  int needed[kMaxRanks];               // rows that r's slot must hold
  int is_bound[kMaxRanks];             // whether r drops rows beyond its limit
  uint8_t* slot[kMaxRanks];            // r's slot, as this rank maps it
  int num_recv, max_sent, max_recv;
};

struct Range {
  int begin, end;
};

__device__ Range share_of(int total, int part, int num_parts) {
  return {static_cast<int>(static_cast<int64_t>(total) * part / num_parts),
          static_cast<int>(static_cast<int64_t>(total) * (part + 1) / num_parts)};
}

// Dynamic shared memory: expert counters while routes are made, then the rings.
__device__ int* warp_expert_counts(uint8_t* shared, int warp, int num_experts) {
  return reinterpret_cast<int*>(shared) + warp * num_experts;
}

// Gives each token its place among the tokens of its warp that go to the same rank, and likewise per expert.
__device__ void count_tokens(const DispatchParams& params, const Range tokens, Routes& routes, uint8_t* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_ranks = params.domain.num_ranks, num_topk = params.num_topk;
  const ExpertMap experts{params.num_experts, num_ranks};
  const TokenLanes lanes(num_topk);
  int* rank_counts = routes.warp_counts[warp];
  int* expert_counts = warp_expert_counts(shared, warp, params.num_experts);

  const auto is_there = [&](int token) { return lanes.mates != 0 && token < tokens.end; };
  // A batch of loads is on its way while the batch before is counted.
  const auto load_experts = [&](int first, int64_t (&experts_of)[kStepsPerBatch]) {
#pragma unroll
    for (int i = 0; i < kStepsPerBatch; ++i) {
      const int token = first + i * lanes.num_tokens + lanes.token;
      const int64_t cell = static_cast<int64_t>(token) * num_topk + lanes.column;
      experts_of[i] = is_there(token) ? params.topk_idx[cell] : -1;
    }
  };
  const auto count_step = [&](int token, int64_t expert) {
    if (expert < -1 || expert >= params.num_experts) {
      report_fault(params.domain.fault, FaultKind::kBadExpert, KernelName::kDispatch, WaitTag::kCounts,
                   params.domain.rank, -1, params.num_experts, expert);
      expert = -1;
    }
    const unsigned same_expert = __match_any_sync(kAllLanes, static_cast<int>(expert));
    const bool is_first = expert >= 0 && (same_expert & lanes.mates & lanes.before) == 0;
    const unsigned firsts = __ballot_sync(kAllLanes, is_first);
    const int rank = is_first ? experts.rank_of(expert) : -1;
    const unsigned same_rank = __match_any_sync(kAllLanes, rank);
    const bool is_leader = is_first && (same_rank & lanes.mates & lanes.before) == 0;
    const unsigned copies = firsts & same_expert, crossings = __ballot_sync(kAllLanes, is_leader) & same_rank;
    const int expert_place = is_first ? expert_counts[expert] + __popc(copies & lanes.before) : -1;
    const int slot = is_leader ? rank_counts[rank] + __popc(crossings & lanes.before) : -1;
    __syncwarp();
    // The last of those that have counted the same.
    if (is_first && copies >> lane == 1) expert_counts[expert] = expert_place + 1;
    if (is_leader && crossings >> lane == 1) rank_counts[rank] = slot + 1;
    __syncwarp();
    if (is_leader) params.send_slot[static_cast<int64_t>(token) * num_ranks + rank] = slot;
    if (!is_there(token)) return;
    if (params.pad_multiple > 0) {
      params.expert_place[static_cast<int64_t>(token) * num_topk + lanes.column] = expert_place;
    }
    if (lanes.column == 0) params.first_mask[token] = (firsts & lanes.mates) >> lanes.first;
  };
  int64_t batch[kStepsPerBatch], next[kStepsPerBatch];
  const int tokens_per_batch = kStepsPerBatch * lanes.num_tokens;
  load_experts(tokens.begin, batch);
  for (int r = lane; r < num_ranks; r += 32) rank_counts[r] = 0;
  for (int e = lane; e < params.num_experts; e += 32) expert_counts[e] = 0;
  const int64_t first_cell = static_cast<int64_t>(tokens.begin) * num_ranks;
  const int num_cells = (tokens.end - tokens.begin) * num_ranks;
  for (int i = lane; i < num_cells; i += 32) params.send_slot[first_cell + i] = -1;
  for (int i = lane; i < num_cells && params.pad_multiple > 0; i += 32) params.dst_row[first_cell + i] = -1;
  __syncwarp();
  for (int first = tokens.begin; first < tokens.end; first += tokens_per_batch) {
    load_experts(first + tokens_per_batch, next);
#pragma unroll
    for (int i = 0; i < kStepsPerBatch; ++i) {
      const int step = first + i * lanes.num_tokens;
      if (step < tokens.end) count_step(step + lanes.token, batch[i]);
      batch[i] = next[i];
    }
  }
}

// Turns the warps' counts into exclusive sums and publishes the CTA's totals to the grid.
__device__ void sum_over_warps(const DispatchParams& params, Routes& routes, uint8_t* shared) {
  ControlBlock& own = *params.domain.control[params.domain.rank];
  const int num_ranks = params.domain.num_ranks;
  for (int i = threadIdx.x; i < num_ranks + params.num_experts; i += kDispatchThreads) {
    int sum = 0;
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

__device__ int sum_over_ctas(const ControlBlock& own, int column, int num_ctas) {
  int sum = 0;
#pragma unroll 16
  for (int c = 0; c < num_ctas; ++c) sum += __ldcg(&own.cta_counts[c][column]);
  return sum;
}

// Tells every rank what this rank sends, and where its own rows shall land. The CTAs share the ranks among them.
__device__ void send_counts(const DispatchParams& params, uint32_t epoch) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  for (int peer = blockIdx.x; peer < domain.num_ranks; peer += gridDim.x) {
    CountRow& row = domain.control[peer]->counts[domain.rank];
    const int num_columns = domain.num_ranks + (params.topk_idx == nullptr ? 0 : params.num_experts);
    for (int i = threadIdx.x; i < num_columns; i += kDispatchThreads) {
      int& column = i < domain.num_ranks ? row.num_tokens_per_rank[i] : row.num_tokens_per_expert[i - domain.num_ranks];
      column = params.topk_idx == nullptr
                   ? params.rank_prefix[domain.rank * domain.num_ranks + i] -
                         (domain.rank > 0 ? params.rank_prefix[(domain.rank - 1) * domain.num_ranks + i] : 0)
                   : sum_over_ctas(own, i, gridDim.x);
    }
    if (threadIdx.x == 0) {
      row.slot_idx = params.slot_idx;
      row.row_limit = params.row_limit;
      row.is_bound = params.is_bound;
      row.num_experts = params.num_experts;
      row.record_bytes = params.record_bytes;
      row.pad_multiple = params.pad_multiple;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::store_release_system(&domain.control[peer]->counts_epoch[domain.rank], epoch);
    }
  }
}

// Whether rank r, which has told its counts, makes the same call: where rows land follows from all ranks' alike. One
// thread for each rank.
__device__ bool makes_same_call(const DispatchParams& params, int r) {
  const Domain& domain = params.domain;
  const CountRow& row = domain.control[domain.rank]->counts[r];
  // All at once, before the first is looked at.
  const int32_t num_experts = __ldcg(&row.num_experts), record_bytes = __ldcg(&row.record_bytes);
  const int32_t pad_multiple = __ldcg(&row.pad_multiple), is_bound = __ldcg(&row.is_bound);
  const auto is_same = [&](WaitTag what, int32_t mine, int32_t seen) {
    if (seen != mine && blockIdx.x == 0) {
      report_fault(domain.fault, FaultKind::kOtherCall, KernelName::kDispatch, what, domain.rank, r, mine, seen);
    }
    return seen == mine;
  };
  return is_same(WaitTag::kNumExperts, params.num_experts, num_experts) &&
         is_same(WaitTag::kRecordBytes, params.record_bytes, record_bytes) &&
         is_same(WaitTag::kPadMultiple, params.pad_multiple, pad_multiple) &&
         is_same(WaitTag::kBound, params.is_bound, is_bound);
}

// Of a call that has failed, which the host may not know yet: an empty route, so that kernels that are queued behind it
// find nothing to do. Every CTA clears its tokens.
__device__ void clear_route(const DispatchParams& params, const Range tokens) {
  const int num_ranks = params.domain.num_ranks;
  const int64_t first_cell = static_cast<int64_t>(tokens.begin) * num_ranks;
  const int num_cells = (tokens.end - tokens.begin) * num_ranks;
  for (int i = threadIdx.x; i < num_cells; i += kDispatchThreads) params.send_slot[first_cell + i] = -1;
  if (blockIdx.x > 0) return;
  for (int i = threadIdx.x; i < num_ranks * num_ranks; i += kDispatchThreads) params.rank_prefix[i] = 0;
  const int num_counts = params.num_experts / num_ranks * (params.pad_multiple > 0 ? 2 : 1);
  for (int i = threadIdx.x; i < num_counts; i += kDispatchThreads) params.num_tokens_per_expert[i] = 0;
}

// Reads what all ranks have told and finds where this rank's rows begin at each of them. Every CTA does it for itself.
// Expert-major: expert_base[e] becomes the row, at its rank, of this CTA's first copy for expert e.
__device__ void find_bases(const DispatchParams& params, Routes& routes, int* expert_base) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  const int num_ranks = domain.num_ranks;
  for (int r = threadIdx.x; r < num_ranks; r += kDispatchThreads) {
    int before_me = 0, total = 0, sent_by_r = 0;
#pragma unroll 8
    for (int i = 0; i < num_ranks; ++i) {
      const int count = __ldcg(&own.counts[i].num_tokens_per_rank[r]);
      if (i < domain.rank) before_me += count;
      if (i == domain.rank) routes.sent[r] = count;
      total += count;
      sent_by_r += __ldcg(&own.counts[r].num_tokens_per_rank[i]);
      if (blockIdx.x == 0 && params.topk_idx != nullptr) params.rank_prefix[i * num_ranks + r] = total;
    }
    routes.recv_base[r] = before_me;
    routes.row_limit[r] = __ldcg(&own.counts[r].row_limit);
    routes.slot[r] = domain.arena[r] + __ldcg(&own.counts[r].slot_idx) * domain.slot_bytes;
    routes.needed[r] = total;
    routes.is_bound[r] = __ldcg(&own.counts[r].is_bound);
    if (params.topk_idx == nullptr) {
      const Range slots = share_of(routes.sent[r], blockIdx.x, gridDim.x);
      routes.cta_base[r] = slots.begin;
      routes.cta_count[r] = slots.end - slots.begin;
    }
    if (r == domain.rank) routes.num_recv = total;
    atomicMax(&routes.max_recv, total);
    atomicMax(&routes.max_sent, sent_by_r);
  }
  if (params.topk_idx == nullptr || params.pad_multiple == 0) return;

  const ExpertMap experts{params.num_experts, num_ranks};
  for (int e = threadIdx.x; e < params.num_experts; e += kDispatchThreads) {
    int before_me = 0, total = 0;
#pragma unroll 4
    for (int i = 0; i < num_ranks; ++i) {
      const int count = __ldcg(&own.counts[i].num_tokens_per_expert[e]);
      if (i < domain.rank) before_me += count;
      total += count;
    }
    // NOTE: the upper array holds the block sizes until the sums over them are made.
    expert_base[e] = before_me + sum_over_ctas(own, num_ranks + e, blockIdx.x);
    expert_base[params.num_experts + e] = (total + params.pad_multiple - 1) / params.pad_multiple * params.pad_multiple;
  }
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += kDispatchThreads) {
    int begin = 0;
    for (int l = 0; l < experts.num_local_experts(); ++l) {
      const int e = r * experts.num_local_experts() + l;
      expert_base[e] += begin;
      begin += expert_base[params.num_experts + e];
    }
    routes.needed[r] = begin;
  }
}

// Writes what the host and later calls need to know. One warp of the grid.
__device__ void report_counts(const DispatchParams& params, const Routes& routes, MailStatus status) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  const int lane = threadIdx.x % 32;
  const int num_local = params.num_experts / domain.num_ranks;
  for (int l = lane; l < num_local && params.topk_idx != nullptr && status != kFailed; l += 32) {
    int total = 0;
#pragma unroll 8
    for (int i = 0; i < domain.num_ranks; ++i) {
      total += __ldcg(&own.counts[i].num_tokens_per_expert[domain.rank * num_local + l]);
    }
    if (params.pad_multiple > 0) {
      params.num_tokens_per_expert[num_local + l] = total;
      total = (total + params.pad_multiple - 1) / params.pad_multiple * params.pad_multiple;
    }
    params.num_tokens_per_expert[l] = total;
    if (params.mailbox != nullptr) params.mailbox->num_tokens_per_expert[l] = total;
  }
  __syncwarp();
  if (lane != 0) return;
  const int needed = routes.needed[domain.rank], limit = routes.row_limit[domain.rank];
  if (params.overflow != nullptr) {
    *params.overflow = status == kSent && needed > limit;
  } else if (status == kSent && needed > limit) {
    report_fault(domain.fault, FaultKind::kOverflow, KernelName::kDispatch, WaitTag::kRows, domain.rank, -1, limit,
                 needed);
  }
  if (params.mailbox == nullptr) return;
  Mailbox& mailbox = *params.mailbox;
  mailbox.status = status;
  if (status != kFailed) {
    int sent_away = 0, max_rows = 0;
    for (int r = 0; r < domain.num_ranks; ++r) {
      if (r != domain.rank) sent_away += routes.sent[r];
      max_rows = max(max_rows, routes.needed[r]);
    }
    mailbox.num_recv = routes.num_recv;
    mailbox.num_permuted = params.pad_multiple > 0 ? needed : 0;
    mailbox.num_sent_away = sent_away;
    mailbox.num_kept = routes.sent[domain.rank];
    mailbox.max_recv = routes.max_recv;
    mailbox.max_sent = routes.max_sent;
    mailbox.max_rows = max_rows;
  }
  ptx::store_release_system(&mailbox.ticket, params.ticket);
}

// Makes places final: among all that this rank sends to r. Needs nothing from other ranks.
__device__ void finish_slots(const DispatchParams& params, const Range tokens, const Routes& routes) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_ranks = params.domain.num_ranks;
  const int num_cells = (tokens.end - tokens.begin) * num_ranks;
  for (int cell = lane; cell < num_cells; cell += 32) {
    const int token = tokens.begin + cell / num_ranks, r = cell % num_ranks;
    int32_t& slot = params.send_slot[static_cast<int64_t>(token) * num_ranks + r];
    if (slot < 0) continue;
    slot += routes.cta_base[r] + routes.warp_counts[warp][r];
    params.send_list[static_cast<int64_t>(r) * params.num_tokens + slot] = token;
  }
}

// Expert-major output: turns places among this warp's copies for an expert into rows at the expert's rank, and finds
// the row that a token's one crossing goes to: its lowest.
__device__ void finish_places(const DispatchParams& params, const Range tokens, uint8_t* shared,
                              const int* expert_base) {
  const int warp = threadIdx.x / 32;
  const int num_ranks = params.domain.num_ranks, num_topk = params.num_topk;
  const ExpertMap experts{params.num_experts, num_ranks};
  const TokenLanes lanes(num_topk);
  const int* warp_experts = warp_expert_counts(shared, warp, params.num_experts);
  const auto load = [&](int token, int& place, int64_t& expert) {
    const int64_t cell = static_cast<int64_t>(token) * num_topk + lanes.column;
    const bool is_there = lanes.mates != 0 && token < tokens.end;
    place = is_there ? params.expert_place[cell] : -1;
    expert = is_there ? params.topk_idx[cell] : -1;
  };
  int place, next_place;
  int64_t expert, next_expert;
  load(tokens.begin + lanes.token, place, expert);
  for (int first = tokens.begin; first < tokens.end; first += lanes.num_tokens) {
    const int token = first + lanes.token;
    load(token + lanes.num_tokens, next_place, next_expert);
    int rank = -1;
    if (place >= 0) {
      rank = experts.rank_of(expert);
      place += expert_base[expert] + warp_experts[expert];
      params.expert_place[static_cast<int64_t>(token) * num_topk + lanes.column] = place;
    }
    const unsigned same_rank = __match_any_sync(kAllLanes, rank) & lanes.mates;
    int lowest = place;
    for (int k = 0; k < num_topk; ++k) {
      const int other_lane = (lanes.first + k) % 32, other = __shfl_sync(kAllLanes, place, other_lane);
      if (same_rank >> other_lane & 1) lowest = min(lowest, other);
    }
    if (rank >= 0 && (same_rank & lanes.before) == 0) {
      params.dst_row[static_cast<int64_t>(token) * num_ranks + rank] = lowest;
    }
    place = next_place;
    expert = next_expert;
  }
}

}  // namespace
}  // namespace hybrid_ep
