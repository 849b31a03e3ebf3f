// What a dispatch writes for the host and for later calls. Legend: routes.cuh.
#pragma once

#include "device/replica_mapping.cuh"
#include "kernels/dispatch/exchange.cuh"

namespace hybrid_ep {
namespace {

// Empties the route of a failed call, because kernels that use it may be queued already, and rows of experts. Every CTA
// clears its tokens. The warp that reports clears the counts.
__device__ void clear_route(const DispatchParams& params, const Range tokens) {
  const int num_ranks = params.domain.num_ranks;
  const int64_t first_cell = static_cast<int64_t>(tokens.begin) * num_ranks;
  const int num_cells = (tokens.end - tokens.begin) * num_ranks;
  for (int i = threadIdx.x; i < num_cells; i += kDispatchThreads) params.send_slot[first_cell + i] = -1;
  if (params.mapping_checksum == nullptr) return;
  const Domain& domain = params.domain;
  uint8_t* slot = domain.arena[domain.rank] + params.call[CountRow::kSlotIdx] * domain.slot_bytes;
  clear_rows(slot + params.slot.rows, static_cast<int64_t>(params.row_limit) * params.row_bytes);
}

// Reports the most slots that any rank's pool wants, or 0 if the words of some rank did not come. Called by one warp of
// the grid.
__device__ void report_pool(const DispatchParams& params, const DispatchRoutes& routes, bool ok) {
  if (params.pool_report == nullptr) return;
  int wanted = 0;
  for (int r = threadIdx.x % 32; r < params.domain.num_ranks && ok; r += 32) {
    wanted = max(wanted, routes.call[r][CountRow::kSlotsWanted]);
  }
  wanted = __reduce_max_sync(kAllLanes, wanted);
  if (threadIdx.x % 32 == 0) {
    ptx::store_relaxed_system(params.pool_report, static_cast<uint64_t>(wanted) << 32 | params.pool_call);
  }
}

// Writes the counts for the host and for later calls; zeroes for a failed call. Called by one warp of the grid. Returns
// whether all counts came.
__device__ bool report_counts(const DispatchParams& params, const Waiter& waiter, uint32_t epoch,
                              const DispatchRoutes& routes, CallStatus status) {
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
    ok &= receive_cells(
        own, waiter, epoch, 0, num_sources, 1, [&](int i) { return Cell{i, column}; },
        [&](Cell, int count) { total += count; });
    if (params.pad_multiple > 0) {
      params.num_tokens_per_expert[num_local + l] = total;
      total = (total + params.pad_multiple - 1) / params.pad_multiple * params.pad_multiple;
      params.returned_counts[l] = total;
    }
    params.num_tokens_per_expert[l] = total;
    if (params.host_counts != nullptr) params.host_counts->num_tokens_per_expert[l] = total;
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
  // Every rank reports rows that any rank drops, because its own combine will lack them. All name the same rank.
  int lowest = num_ranks;
  for (int r = lane; r < num_ranks && status == kSent; r += 32) {
    if (routes.needed[r] > routes.call[r][CountRow::kRowLimit]) lowest = min(lowest, r);
  }
  lowest = __reduce_min_sync(kAllLanes, lowest);
  const bool drops_rows = lowest < num_ranks;
  if (drops_rows && params.reports_overflow && lane == 0) {
    report_fault(domain.fault, FaultKind::kOverflow, KernelName::kDispatch, WaitTag::kRows, domain.rank, lowest,
                 routes.call[lowest][CountRow::kRowLimit], routes.needed[lowest]);
  }
  __syncwarp();  // what the lanes have written to the host counts comes before their epoch
  if (lane != 0) return ok;
  if (params.overflow != nullptr) *params.overflow = drops_rows;
  if (params.host_counts == nullptr) return ok;
  HostCounts& host_counts = *params.host_counts;
  host_counts.status = status;
  if (status != kFailed) {
    int sent_away = 0, max_rows = 0;
    for (int r = 0; r < num_ranks; ++r) {
      if (r != domain.rank) sent_away += routes.sent[r];
      max_rows = max(max_rows, routes.needed[r]);
    }
    host_counts.num_recv = routes.num_recv[domain.rank];
    host_counts.num_permuted = params.pad_multiple > 0 ? routes.needed[domain.rank] : 0;
    host_counts.num_sent_away = sent_away;
    host_counts.num_kept = routes.sent[domain.rank];
    host_counts.max_recv = max_recv;
    host_counts.max_sent = max_sent;
    host_counts.max_rows = params.is_bounded ? params.common_bound : max_rows;
  }
  ptx::store_release_system(&host_counts.epoch, params.counts_epoch);
  return ok;
}

}  // namespace
}  // namespace hybrid_ep
