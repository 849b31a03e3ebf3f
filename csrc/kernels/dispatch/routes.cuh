// Where the tokens of a dispatch go: counts, their exchange, and the places that follow from them. Part of dispatch.cu.
//
// Every function is collective over the CTA unless it says otherwise. A kernel begins with cold instruction caches, and
// of what runs once a CTA waits for each line, so that loops of few steps are not unrolled. Legend: T tokens, K top-k,
// E experts, R ranks.
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
constexpr int kWordsAhead = 4;     // of counts that a thread loads at once

// What a CTA knows about the call once the counts are exchanged.
struct DispatchRoutes {
  int warp_counts[kWarps][kMaxRanks];              // tokens per rank; turned into exclusive sums over warps
  int cta_base[kMaxRanks];                         // tokens to r in the CTAs before
  int cta_count[kMaxRanks];                        // tokens to r in this CTA
  int call[kMaxRanks][CountRow::kNumCallColumns];  // what r has told of its call
  int recv_base[kMaxRanks];                        // this rank's first row at r
  int num_recv[kMaxRanks];                         // rows that r receives
  int sent[kMaxRanks];                             // tokens from this rank to r
  int needed[kMaxRanks];                           // rows that r's slot must hold
  uint8_t* slot[kMaxRanks];                        // r's slot, as this rank maps it
};

struct Range {
  int begin, end;
};

// `total` × num_parts is below 2³¹.
__device__ Range share_of(int total, int part, int num_parts) {
  return {total * part / num_parts, total * (part + 1) / num_parts};
}

// Dynamic shared memory: expert counters while routes are made, then the rings.
__device__ int* warp_expert_counts(uint8_t* shared, int warp, int num_experts) {
  return reinterpret_cast<int*>(shared) + warp * num_experts;
}

// Gives each token its place among the tokens of its warp that go to the same rank, and likewise per expert.
__device__ void count_tokens(const DispatchParams& params, const Range tokens, DispatchRoutes& routes,
                             uint8_t* shared) {
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

__device__ int sum_over_ctas(const ControlBlock& own, int column, int num_ctas) {
  int sum = 0;
#pragma unroll 16
  for (int c = 0; c < num_ctas; ++c) sum += __ldcg(&own.cta_counts[c][column]);
  return sum;
}

// Tells every rank what this rank sends, and where its own rows shall land. The CTAs share the ranks among them.
__device__ void send_counts(const DispatchParams& params, uint32_t epoch) {
  const Domain& domain = params.domain;
  const int num_ranks = domain.num_ranks;
  for (int peer = blockIdx.x; peer < num_ranks; peer += gridDim.x) {
    uint64_t* words = domain.control[peer]->counts[domain.rank].words;
    const auto tell = [&](int column, int value) {
      ptx::store_relaxed_system(words + column, static_cast<uint64_t>(value) << 32 | epoch);
    };
    const int num_columns = num_ranks + (params.topk_idx == nullptr ? 0 : params.num_experts);
    for (int i = threadIdx.x; i < num_columns; i += kDispatchThreads) {
      const int count = params.topk_idx == nullptr
                            ? params.rank_prefix[domain.rank * num_ranks + i] -
                                  (domain.rank > 0 ? params.rank_prefix[(domain.rank - 1) * num_ranks + i] : 0)
                            : sum_over_ctas(*domain.control[domain.rank], i, gridDim.x);
      tell(i < num_ranks ? CountRow::kTokensPerRank + i : CountRow::kTokensPerExpert + i - num_ranks, count);
    }
    if (threadIdx.x != kDispatchThreads - 1) continue;
    tell(CountRow::kSlotIdx, params.slot_idx);
    tell(CountRow::kRowLimit, params.row_limit);
    tell(CountRow::kNumExperts, params.num_experts);
    tell(CountRow::kRecordBytes, params.record_bytes);
    tell(CountRow::kPadMultiple, params.pad_multiple);
    tell(CountRow::kIsBound, params.is_bound);
  }
}

struct Cell {
  int source, column;
};

// Gives visit(cell, value) the cells first, first + step, … of what ranks have told, each once it is there. Returns
// whether all came. By one thread.
template <typename CellOf, typename Visit>
__device__ bool learn(const ControlBlock& own, const Waiter& waiter, uint32_t epoch, int first, int end, int step,
                      CellOf&& cell_of, Visit&& visit) {
  bool ok = true;
  for (int begin = first; begin < end; begin += kWordsAhead * step) {
    uint64_t words[kWordsAhead];
#pragma unroll
    for (int j = 0; j < kWordsAhead; ++j) {
      const int i = begin + j * step;
      if (i >= end) continue;
      const Cell cell = cell_of(i);
      words[j] = ptx::load_relaxed_system(&own.counts[cell.source].words[cell.column]);
    }
#pragma unroll
    for (int j = 0; j < kWordsAhead; ++j) {
      const int i = begin + j * step;
      if (i >= end) continue;
      const Cell cell = cell_of(i);
      if (static_cast<uint32_t>(words[j]) != epoch) {
        const uint64_t* word = &own.counts[cell.source].words[cell.column];
        ok &= waiter.until_equal(word, epoch, cell.source, WaitTag::kCounts, &words[j]);
      }
      visit(cell, static_cast<int>(words[j] >> 32));
    }
  }
  return ok;
}

// The same for `num_columns` columns of every rank, by all threads of the CTA.
template <typename Visit>
__device__ bool learn_columns(const DispatchParams& params, const Waiter& waiter, uint32_t epoch, int first_column,
                              int num_columns, Visit&& visit) {
  const Domain& domain = params.domain;
  const auto cell_of = [&](int i) { return Cell{i / num_columns, first_column + i % num_columns}; };
  return learn(*domain.control[domain.rank], waiter, epoch, threadIdx.x, domain.num_ranks * num_columns,
               kDispatchThreads, cell_of, visit);
}

// What every rank tells of its call, and the sums over ranks of what they send to each: to routes that are 0.
__device__ bool learn_call(const DispatchParams& params, const Waiter& waiter, uint32_t epoch, DispatchRoutes& routes) {
  const int rank = params.domain.rank, num_columns = CountRow::kNumCallColumns + params.domain.num_ranks;
  return learn_columns(params, waiter, epoch, 0, num_columns, [&](Cell cell, int value) {
    if (cell.column < CountRow::kNumCallColumns) {
      routes.call[cell.source][cell.column] = value;
      return;
    }
    const int r = cell.column - CountRow::kTokensPerRank;
    atomicAdd(&routes.num_recv[r], value);
    if (cell.source < rank) atomicAdd(&routes.recv_base[r], value);
    if (cell.source == rank) routes.sent[r] = value;
  });
}

// Whether rank r makes the same call: where rows land follows from all ranks' alike. One thread for each rank.
__device__ bool makes_same_call(const DispatchParams& params, const DispatchRoutes& routes, int r) {
  const Domain& domain = params.domain;
  const auto is_same = [&](WaitTag what, CountRow::Column column, int mine) {
    const int seen = routes.call[r][column];
    if (seen != mine && blockIdx.x == 0) {
      report_fault(domain.fault, FaultKind::kOtherCall, KernelName::kDispatch, what, domain.rank, r, mine, seen);
    }
    return seen == mine;
  };
  return is_same(WaitTag::kNumExperts, CountRow::kNumExperts, params.num_experts) &&
         is_same(WaitTag::kRecordBytes, CountRow::kRecordBytes, params.record_bytes) &&
         is_same(WaitTag::kPadMultiple, CountRow::kPadMultiple, params.pad_multiple) &&
         is_same(WaitTag::kBound, CountRow::kIsBound, params.is_bound);
}

// Of a call that has failed, which the host may not know yet: an empty route, so that kernels that are queued behind it
// find nothing to do. Every CTA clears its tokens; the counts are cleared by who reports them.
__device__ void clear_route(const DispatchParams& params, const Range tokens) {
  const int num_ranks = params.domain.num_ranks;
  const int64_t first_cell = static_cast<int64_t>(tokens.begin) * num_ranks;
  const int num_cells = (tokens.end - tokens.begin) * num_ranks;
  for (int i = threadIdx.x; i < num_cells; i += kDispatchThreads) params.send_slot[first_cell + i] = -1;
}

// Finds where this rank's rows begin at each rank. Every CTA does it for itself. Returns whether all counts came.
// Expert-major: expert_base[e] becomes the row, at its rank, of this CTA's first copy for expert e.
__device__ bool find_bases(const DispatchParams& params, const Waiter& waiter, uint32_t epoch, DispatchRoutes& routes,
                           int* expert_base) {
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

  int* block_rows = expert_base + num_experts;  // of each expert at its rank, without pads
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
  const bool ok = learn_columns(params, waiter, epoch, CountRow::kTokensPerExpert, num_experts, add);
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

// Writes what the host and later calls need to know: of a call that has failed, that there is nothing. One warp of the
// grid. Returns whether all counts came.
__device__ bool report_counts(const DispatchParams& params, const Waiter& waiter, uint32_t epoch,
                              const DispatchRoutes& routes, MailStatus status) {
  const Domain& domain = params.domain;
  const ControlBlock& own = *domain.control[domain.rank];
  const int lane = threadIdx.x % 32, num_ranks = domain.num_ranks;
  const bool makes_route = params.topk_idx != nullptr;
  bool ok = true;
  const int num_local = params.num_experts / num_ranks;
  const int num_sources = status == kFailed ? 0 : num_ranks;
  for (int l = lane; l < num_local && makes_route; l += 32) {
    const int column = CountRow::kTokensPerExpert + domain.rank * num_local + l;
    int total = 0;
    ok &= learn(
        own, waiter, epoch, 0, num_sources, 1, [&](int i) { return Cell{i, column}; },
        [&](Cell, int count) { total += count; });
    if (params.pad_multiple > 0) {
      params.num_tokens_per_expert[num_local + l] = total;
      total = (total + params.pad_multiple - 1) / params.pad_multiple * params.pad_multiple;
    }
    params.num_tokens_per_expert[l] = total;
    if (params.mailbox != nullptr) params.mailbox->num_tokens_per_expert[l] = total;
  }
  ok = __all_sync(kAllLanes, ok);
  if (!ok) status = kFailed;
  int max_recv = 0, max_sent = 0;
  const auto tokens_to = [&](int source, int r) {  // which has been waited for
    const uint64_t word = ptx::load_relaxed_system(&own.counts[source].words[CountRow::kTokensPerRank + r]);
    return status == kFailed ? 0 : static_cast<int>(word >> 32);
  };
  for (int r = lane; r < num_ranks; r += 32) {
    int sent_by_r = 0, received = 0;
#pragma unroll 8
    for (int i = 0; i < num_ranks; ++i) {
      sent_by_r += tokens_to(r, i);
      received += tokens_to(i, r);
      if (makes_route) params.rank_prefix[i * num_ranks + r] = received;
    }
    max_sent = max(max_sent, sent_by_r);
    max_recv = max(max_recv, received);
  }
  max_sent = __reduce_max_sync(kAllLanes, max_sent);
  max_recv = __reduce_max_sync(kAllLanes, max_recv);
  // Every rank reports where rows are dropped: its own combine will lack them.
  for (int r = lane; r < num_ranks && params.overflow == nullptr && status == kSent; r += 32) {
    const int needed = routes.needed[r], limit = routes.call[r][CountRow::kRowLimit];
    if (needed <= limit) continue;
    report_fault(domain.fault, FaultKind::kOverflow, KernelName::kDispatch, WaitTag::kRows, domain.rank, r, limit,
                 needed);
  }
  __syncwarp();  // what the lanes have written to the mailbox comes before its ticket
  if (lane != 0) return ok;
  const int needed = routes.needed[domain.rank];
  if (params.overflow != nullptr) *params.overflow = status == kSent && needed > params.row_limit;
  if (params.mailbox == nullptr) return ok;
  Mailbox& mailbox = *params.mailbox;
  mailbox.status = status;
  if (status != kFailed) {
    int sent_away = 0, max_rows = 0;
    for (int r = 0; r < num_ranks; ++r) {
      if (r != domain.rank) sent_away += routes.sent[r];
      max_rows = max(max_rows, routes.needed[r]);
    }
    mailbox.num_recv = routes.num_recv[domain.rank];
    mailbox.num_permuted = params.pad_multiple > 0 ? needed : 0;
    mailbox.num_sent_away = sent_away;
    mailbox.num_kept = routes.sent[domain.rank];
    mailbox.max_recv = max_recv;
    mailbox.max_sent = max_sent;
    mailbox.max_rows = max_rows;
  }
  ptx::store_release_system(&mailbox.ticket, params.ticket);
  return ok;
}

// Makes places final: among all that this rank sends to r. Needs nothing from other ranks.
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
