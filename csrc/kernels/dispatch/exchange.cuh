// The exchange of counts and fields of the call at the start of a dispatch. Legend: routes.cuh.
#pragma once

#include "device/refuse.cuh"
#include "kernels/dispatch/routes.cuh"

namespace hybrid_ep {
namespace {

constexpr int kWordsAhead = 4;  // of counts that a thread loads at once

// What this rank publishes in a column of the call. The checksum of a mapping is in device memory only.
__device__ int own_column(const DispatchParams& params, int column) {
  constexpr int kChecksum = CountRow::kFirstField + static_cast<int>(CallField::kReplicaMapping);
  const bool is_checksum = column == kChecksum && params.mapping_checksum != nullptr;
  return is_checksum ? static_cast<int>(*params.mapping_checksum) : params.call[column];
}

// Writes to every rank the counts of this rank, and the slot for its own rows. CTAs share the ranks.
__device__ void send_counts(const DispatchParams& params, uint32_t epoch) {
  const Domain& domain = params.domain;
  const int num_ranks = domain.num_ranks;
  for (int peer = blockIdx.x; peer < num_ranks; peer += gridDim.x) {
    uint64_t* words = domain.control[peer]->counts[domain.rank].words;
    const auto publish = [&](int column, int value) {
      ptx::store_relaxed_system(words + column, static_cast<uint64_t>(value) << 32 | epoch);
    };
    const int num_columns = num_ranks + (params.topk_idx == nullptr ? 0 : params.num_experts);
    for (int i = threadIdx.x; i < num_columns; i += kDispatchThreads) {
      const int count = params.topk_idx == nullptr
                            ? params.rank_prefix[domain.rank * num_ranks + i] -
                                  (domain.rank > 0 ? params.rank_prefix[(domain.rank - 1) * num_ranks + i] : 0)
                            : sum_over_ctas(*domain.control[domain.rank], i, gridDim.x);
      publish(i < num_ranks ? CountRow::kTokensPerRank + i : CountRow::kTokensPerExpert + i - num_ranks, count);
    }
    // The last threads publish the columns of the call, one each.
    const int column = kDispatchThreads - 1 - threadIdx.x;
    if (column >= CountRow::kNumCallColumns) continue;
    int value = own_column(params, column);
    if (column == CountRow::kRefusal || column == CountRow::kRefusedValue) {
      const Refusal refusal = find_refusal(*domain.control[domain.rank], value, value);
      value = column == CountRow::kRefusal ? refusal.kind : refusal.value;
    }
    publish(column, value);
  }
}

struct Cell {
  int source, column;
};

// Waits for the cells first, first + step, … of the words of all ranks, and calls visit(cell, value) for each.
// Called by one thread. Returns whether all came.
template <typename CellOf, typename Visit>
__device__ bool receive_cells(const ControlBlock& own, const Waiter& waiter, uint32_t epoch, int first, int end,
                              int step, CellOf&& cell_of, Visit&& visit) {
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

// receive_cells() for `num_columns` columns of every rank, by all threads of the CTA.
template <typename Visit>
__device__ bool receive_columns(const DispatchParams& params, const Waiter& waiter, uint32_t epoch, int first_column,
                                int num_columns, Visit&& visit) {
  const Domain& domain = params.domain;
  const auto cell_of = [&](int i) { return Cell{i / num_columns, first_column + i % num_columns}; };
  return receive_cells(*domain.control[domain.rank], waiter, epoch, threadIdx.x, domain.num_ranks * num_columns,
                       kDispatchThreads, cell_of, visit);
}

// Waits for the call of every rank, and adds up the counts of all ranks. `routes` are cleared before.
__device__ bool receive_calls(const DispatchParams& params, const Waiter& waiter, uint32_t epoch,
                              DispatchRoutes& routes) {
  const int rank = params.domain.rank, num_columns = CountRow::kNumCallColumns + params.domain.num_ranks;
  return receive_columns(params, waiter, epoch, 0, num_columns, [&](Cell cell, int value) {
    if (cell.column < CountRow::kFirstField) {
      // A wrong limit of a rank must not let others store beyond its slot.
      const bool is_limit = cell.column == CountRow::kRowLimit;
      routes.call[cell.source][cell.column] = is_limit ? min(value, params.slot.capacity) : value;
      return;
    }
    if (cell.column < CountRow::kNumCallColumns) {
      if (value != own_column(params, cell.column)) atomicMin(&routes.other_column[cell.source], cell.column);
      return;
    }
    const int r = cell.column - CountRow::kTokensPerRank;
    atomicAdd(&routes.num_recv[r], value);
    if (cell.source < rank) atomicAdd(&routes.recv_base[r], value);
    if (cell.source == rank) routes.sent[r] = value;
  });
}

// Whether rank r makes the same call and has not refused it. Every rank reports a refusal. One thread for each rank.
__device__ bool accepts_call(const DispatchParams& params, const DispatchRoutes& routes, int r) {
  const Domain& domain = params.domain;
  const int column = routes.other_column[r], refusal = routes.call[r][CountRow::kRefusal];
  const bool is_same = column == CountRow::kNumCallColumns;
  if (is_same && refusal == 0) return true;
  // A rank that refuses the call publishes nothing else of it, and its own host raises.
  constexpr int kRefused = static_cast<int>(FaultKind::kRefused);
  if (blockIdx.x != 0 || params.call[CountRow::kRefusal] == kRefused) return false;
  if (!is_same && refusal != kRefused) {
    const uint64_t word = ptx::load_relaxed_system(&domain.control[domain.rank]->counts[r].words[column]);
    report_other_call(domain.fault, KernelName::kDispatch, static_cast<CallField>(column - CountRow::kFirstField),
                      domain.rank, r, own_column(params, column), static_cast<int32_t>(word >> 32));
    return false;
  }
  // This rank's host has reported its own refusal.
  const auto kind = static_cast<FaultKind>(refusal);
  if (r == domain.rank && kind != FaultKind::kBadExpert) return false;
  report_refusal(domain.fault, KernelName::kDispatch, kind, domain.rank, r, params.num_experts, params.common_bound,
                 params.max_tokens, routes.call[r][CountRow::kRefusedValue]);
  return false;
}

}  // namespace
}  // namespace hybrid_ep
