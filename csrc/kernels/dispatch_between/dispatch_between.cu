// Dispatch between domains: exchange of counts, both hops and the push in one persistent launch.
//
//     x[t] ─────────► this domain: a bulk store per rank ─────────────────────────────────► row of every receiver
//     x[t], top-k ─► records ─► chunk ─ link ─► peer: records ─ a bulk store per rank ──► row of every receiver
//
// A token crosses to another domain once. Its record has its destinations: a rank, and the token's index among those
// that its source sends there. So the peer can forward each record alone. Warps that forward never wait for warps that
// send, so a rank always returns credits. The indices come from index_tokens.cu. Legend: T tokens, K top-k, D domains,
// G ranks of a domain.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/row_mover.cuh"
#include "device/work_index.cuh"
#include "kernels/dispatch_between/exchange.cuh"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

// Warps of a CTA by role. Those that push this rank's tokens send records afterwards.
constexpr int kOwnWarps = 2, kSendWarps = 3, kForwardWarps = 3;
constexpr int kWarps = kOwnWarps + kSendWarps + kForwardWarps;
constexpr int kThreads = kWarps * 32;
constexpr int kRingsBytes = kWarps * RowMover::kRingBytes;

__device__ int num_chunks(const DispatchBetweenParams& params, int num_records) {
  return (num_records + params.record.per_chunk - 1) / params.record.per_chunk;
}

// One column of a token's top-k, which a lane has: its destination in this domain, expert and weight.
struct Column {
  uint32_t destination;
  int expert;  // −1: none
  float weight;
};

// Pushes a row with its scales, experts and weights to its ranks of this domain. `next` is the row that the warp moves
// after it, or nullptr. Collective over the warp.
__device__ void push_token(const DispatchBetweenParams& params, const CallBetween& call, const int* base,
                           RowMover& mover, const uint8_t* row, const uint8_t* next, const uint32_t* scales,
                           const Column& column) {
  const Grid& grid = params.between.grid;
  const int lane = threadIdx.x % 32, first_rank = grid.domain_idx() * grid.ranks_per_domain;
  const int r = rank_of_destination(column.destination) - first_rank;
  int dst_row = -1;
  if (column.destination != kNowhere && r >= 0 && r < grid.ranks_per_domain) {
    dst_row = base[r] + index_of_destination(column.destination);
    if (dst_row >= call.row_limit[r]) dst_row = -1;
  }
  uint8_t* target = nullptr;
  if (dst_row >= 0) target = call.slot[r] + params.slot.rows + static_cast<int64_t>(dst_row) * params.row_bytes;
  mover.move(row, params.row_bytes, target, next);
  for (unsigned left = __ballot_sync(kAllLanes, dst_row >= 0); left != 0; left &= left - 1) {
    const int holder = __ffs(left) - 1;
    const int to = __shfl_sync(kAllLanes, r, holder);
    const int64_t row_idx = __shfl_sync(kAllLanes, dst_row, holder);
    uint8_t* slot = call.slot[to];
    for (int s = lane; s < params.num_scales; s += 32) {
      reinterpret_cast<uint32_t*>(slot + params.slot.scales)[row_idx * params.num_scales + s] = scales[s];
    }
    if (!params.makes_route || lane >= params.num_topk) continue;
    const int expert = column.expert - params.range_first - (first_rank + to) * params.range_step;
    const bool is_reported = column.expert >= 0 && expert >= 0 && expert < params.range_size;
    const int64_t cell = row_idx * params.num_topk + lane;
    reinterpret_cast<int64_t*>(slot + params.slot.experts)[cell] = is_reported ? expert : -1;
    if (params.has_weights) {
      reinterpret_cast<float*>(slot + params.slot.weights)[cell] = is_reported ? column.weight : 0.0f;
    }
  }
}

// A lane's column of a token of this rank.
__device__ Column column_of_token(const DispatchBetweenParams& params, int token) {
  const int lane = threadIdx.x % 32;
  const int64_t cell = static_cast<int64_t>(token) * params.num_topk + lane;
  Column column{kNowhere, -1, 0.0f};
  if (lane < params.num_topk) {
    column.destination = static_cast<uint32_t>(params.route[params.parts.destinations + cell]);
    if (params.makes_route) {
      const int64_t expert = params.topk_idx[cell];
      column.expert = expert >= 0 && expert < params.num_experts ? static_cast<int>(expert) : -1;
      if (params.has_weights) column.weight = params.topk_weights[cell];
    }
  }
  return column;
}

__device__ const uint8_t* row_of_token(const DispatchBetweenParams& params, int token) {
  return params.rows + static_cast<int64_t>(token) * params.row_bytes;
}

__device__ const uint32_t* scales_of_token(const DispatchBetweenParams& params, int token) {
  return params.scales + static_cast<int64_t>(token) * params.num_scales;
}

// Pushes this rank's tokens that stay in the domain.
__device__ void push_own_tokens(const DispatchBetweenParams& params, const CallBetween& call, const int* base,
                                RowMover& mover) {
  const Grid& grid = params.between.grid;
  const int domain = grid.domain_idx();
  const int32_t* list = params.route + params.parts.domain_list + static_cast<int64_t>(domain) * params.num_tokens;
  WorkIndices<> items(&params.between.domain.control[params.between.domain.rank]->sent_items);
  const auto take = [&] {
    const int i = items.take();
    return i < call.num_sent[domain] ? list[i] : -1;
  };
  int token = take();
  Column column = token < 0 ? Column{} : column_of_token(params, token);
  while (token >= 0) {
    const int next = take();
    const Column next_column = next < 0 ? Column{} : column_of_token(params, next);  // loaded while the row moves
    push_token(params, call, base + domain * grid.ranks_per_domain, mover, row_of_token(params, token),
               next < 0 ? nullptr : row_of_token(params, next), scales_of_token(params, token), column);
    token = next;
    column = next_column;
  }
  mover.finish();
}

// A chunk of the stream to or from another domain.
struct ChunkItem {
  int domain, index;  // of the domain's records
  int first, num_records;
};

// Hands out the chunks of all other domains in turn. Collective over the warp.
class ChunkItems {
 public:
  __device__ ChunkItems(const DispatchBetweenParams& params, const int* num_records, uint32_t* counter)
      : params_(params), num_records_(num_records), items_(counter) {
    for (int d = 0; d < params.between.grid.num_domains; ++d) {
      if (d != params.between.grid.domain_idx()) most_ = max(most_, num_chunks(params, num_records[d]));
    }
  }

  __device__ bool next(ChunkItem& item) {
    const Grid& grid = params_.between.grid;
    const int num_peers = grid.num_domains - 1, per_chunk = params_.record.per_chunk;
    while (true) {
      const int number = items_.take();
      if (number >= most_ * num_peers) return false;
      item.domain = (grid.domain_idx() + 1 + number % num_peers) % grid.num_domains;
      item.index = number / num_peers;
      item.first = item.index * per_chunk;
      item.num_records = min(per_chunk, num_records_[item.domain] - item.first);
      if (item.num_records > 0) return true;
    }
  }

 private:
  const DispatchBetweenParams& params_;
  const int* num_records_;
  WorkIndices<> items_;
  int most_ = 0;
};

// Sends records to the peers. Returns false if one of them gives no credit.
template <typename Link>
__device__ bool send_records(const DispatchBetweenParams& params, const CallBetween& call, const Waiter& waiter,
                             const Link& link, RowMover& mover) {
  const BetweenDomain& between = params.between;
  const int lane = threadIdx.x % 32, size = between.grid.ranks_per_domain;
  const RecordLayout& layout = params.record;
  ChunkItems items(params, call.num_sent, &between.domain.control[between.domain.rank]->summed_tokens);
  ChunkItem item;
  while (items.next(item)) {
    const ChunkStream<Link> stream(between, waiter, link, item.domain);
    const int chunk = kControlChunks + item.index;
    if (!__all_sync(kAllLanes, lane > 0 || stream.wait_free(chunk))) return false;
    __syncwarp();
    const int32_t* list =
        params.route + params.parts.domain_list + static_cast<int64_t>(item.domain) * params.num_tokens + item.first;
    int token = list[0];
    Column column = column_of_token(params, token);
    for (int i = 0; i < item.num_records; ++i) {
      const int next = i + 1 < item.num_records ? list[i + 1] : -1;
      const Column next_column = next < 0 ? Column{} : column_of_token(params, next);  // loaded while the row moves
      uint8_t* record = stream.send_slot(chunk) + i * layout.num_bytes;
      mover.move(row_of_token(params, token), params.row_bytes, lane == 0 ? record : nullptr,
                 next < 0 ? nullptr : row_of_token(params, next));
      for (int s = lane; s < params.num_scales; s += 32) {
        reinterpret_cast<uint32_t*>(record + layout.scales)[s] = scales_of_token(params, token)[s];
      }
      if (lane < params.num_topk) {
        const bool goes =
            column.destination != kNowhere && rank_of_destination(column.destination) / size == item.domain;
        reinterpret_cast<uint32_t*>(record + layout.destinations)[lane] = goes ? column.destination : kNowhere;
        if (params.makes_route) reinterpret_cast<int32_t*>(record + layout.experts)[lane] = column.expert;
        if (params.has_weights) reinterpret_cast<float*>(record + layout.weights)[lane] = column.weight;
      }
      token = next;
      column = next_column;
    }
    mover.finish();
    if (!stream.send(chunk, item.num_records * layout.num_bytes, item.num_records)) return false;
  }
  return true;
}

// A lane's column of a record.
__device__ Column column_of_record(const DispatchBetweenParams& params, const uint8_t* record) {
  const int lane = threadIdx.x % 32;
  const RecordLayout& layout = params.record;
  Column column{kNowhere, -1, 0.0f};
  if (lane < params.num_topk) {
    column.destination = reinterpret_cast<const uint32_t*>(record + layout.destinations)[lane];
    if (params.makes_route) column.expert = reinterpret_cast<const int32_t*>(record + layout.experts)[lane];
    if (params.has_weights) column.weight = reinterpret_cast<const float*>(record + layout.weights)[lane];
  }
  return column;
}

// Forwards records of the peers. Returns false if one of them does not come.
template <typename Link>
__device__ bool forward_records(const DispatchBetweenParams& params, const CallBetween& call, const int* base,
                                const Waiter& waiter, const Link& link, RowMover& mover) {
  const BetweenDomain& between = params.between;
  const int lane = threadIdx.x % 32, size = between.grid.ranks_per_domain;
  const RecordLayout& layout = params.record;
  ChunkItems items(params, call.num_records, own_part<uint32_t>(between, between.layout.items));
  ChunkItem item;
  while (items.next(item)) {
    const ChunkStream<Link> stream(between, waiter, link, item.domain);
    const int chunk = kControlChunks + item.index;
    if (!__all_sync(kAllLanes, lane > 0 || stream.wait(chunk))) return false;
    __syncwarp();
    ptx::fence_global_for_bulk();
    const uint8_t* record = stream.chunk(chunk);
    Column column = column_of_record(params, record);
    for (int i = 0; i < item.num_records; ++i) {
      const uint8_t* next = i + 1 < item.num_records ? record + layout.num_bytes : nullptr;
      const Column next_column =
          next == nullptr ? Column{} : column_of_record(params, next);  // in flight during the push
      if (params.makes_route && lane < params.num_topk) {
        const int64_t held = call.held_begin[item.domain] + item.first + i;
        params.route[params.parts.held + held * params.num_topk + lane] = static_cast<int>(column.destination);
      }
      push_token(params, call, base + item.domain * size, mover, record, next,
                 reinterpret_cast<const uint32_t*>(record + layout.scales), column);
      record = next;
      column = next_column;
    }
    __syncwarp();
    const bool ok = lane > 0 || stream.read_rows(chunk, item.num_records, item.num_records);
    if (!__all_sync(kAllLanes, ok)) return false;
  }
  mover.finish();
  return true;
}

// Marks the rows between the last that arrives and the bound: no rank sends them. By `num_threads` threads of the CTA.
__device__ void mark_free_rows(const DispatchBetweenParams& params, const CallBetween& call, int thread,
                               int num_threads) {
  if (!params.makes_route || !params.is_bound) return;
  const int own = params.between.domain.rank;
  const int64_t begin = min(call.needed[own], params.row_limit) * static_cast<int64_t>(params.num_topk);
  const int64_t end = params.row_limit * static_cast<int64_t>(params.num_topk);
  for (int64_t i = begin + blockIdx.x * num_threads + thread; i < end; i += gridDim.x * num_threads) {
    reinterpret_cast<int64_t*>(call.slot[own] + params.slot.experts)[i] = -1;
    if (params.has_weights) reinterpret_cast<float*>(call.slot[own] + params.slot.weights)[i] = 0.0f;
  }
}

// Reports to the host and to later calls, by the first CTA. The route of a failed call is emptied, unless an earlier
// call has made it.
__device__ bool report(const DispatchBetweenParams& params, const CallBetween& call, const Waiter& waiter,
                       uint32_t epoch, CallStatus status) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const BetweenRoute& parts = params.parts;
  const int size = grid.ranks_per_domain, num_ranks = grid.num_ranks(), first_rank = grid.domain_idx() * size;
  const bool fails = status == kFailed;
  bool ok = true;
  for (int d = threadIdx.x; d < grid.num_domains; d += kThreads) {
    if (!fails || params.makes_route) params.route[parts.num_records + d] = fails ? 0 : call.num_records[d];
  }
  const int num_local = params.num_experts / num_ranks, lane = threadIdx.x % 32;
  for (int l = threadIdx.x / 32; params.makes_route && l < num_local; l += kWarps) {
    const int column = CallHeader::kNumColumns + between.layout.num_columns + l;
    int count = 0;
    for (int s = lane; s < num_ranks && !fails; s += 32) count += receive_word(between, waiter, epoch, s, column, &ok);
    const int total = __reduce_add_sync(kAllLanes, count);
    if (lane > 0) continue;
    params.route[parts.num_tokens_per_expert + l] = total;
    if (params.host_counts != nullptr) params.host_counts->num_tokens_per_expert[l] = total;
  }
  const bool has_matrix = between.layout.num_columns == num_ranks;
  for (int r = threadIdx.x; params.makes_route && has_matrix && r < num_ranks; r += kThreads) {
    int rows = 0;
    for (int s = 0; s < num_ranks; ++s) {
      if (!fails && ok) rows += receive_word(between, waiter, epoch, s, CallHeader::kNumColumns + r, &ok);
      params.route[parts.rank_prefix + static_cast<int64_t>(s) * num_ranks + r] = rows;
    }
  }
  if (fails && params.makes_route) {
    const int64_t num_cells = static_cast<int64_t>(params.num_tokens) * params.num_topk;
    for (int64_t i = threadIdx.x; i < num_cells; i += kThreads) params.route[parts.destinations + i] = -1;
    const int64_t num_indices = static_cast<int64_t>(grid.num_domains) * params.num_tokens;
    for (int64_t i = threadIdx.x; i < num_indices; i += kThreads) params.route[parts.list_index + i] = -1;
    for (int r = threadIdx.x; r < num_ranks; r += kThreads) params.route[parts.rank_counts + r] = 0;
    for (int d = threadIdx.x; d < grid.num_domains; d += kThreads) params.route[parts.domain_counts + d] = 0;
    for (int i = threadIdx.x; i < num_ranks * size; i += kThreads) params.route[parts.counts + i] = 0;
  }
  ok = __syncthreads_and(ok);
  if (threadIdx.x != 0 || params.host_counts == nullptr) return ok;
  HostCounts& host_counts = *params.host_counts;
  host_counts.status = ok ? status : kFailed;
  if (!fails) {
    int sent_within = 0, sent_between = 0;
    for (int r = 0; r < size; ++r) {
      if (r != between.domain.rank) sent_within += params.route[parts.rank_counts + first_rank + r];
    }
    for (int d = 0; d < grid.num_domains; ++d) sent_between += d == grid.domain_idx() ? 0 : call.num_sent[d];
    host_counts.num_recv = call.needed[between.domain.rank];
    host_counts.num_permuted = 0;
    host_counts.num_sent_away = sent_within;
    host_counts.num_kept = params.route[parts.rank_counts + grid.rank];
    host_counts.num_sent_between = sent_between;
    host_counts.max_recv = call.verdict.max_rows;
    host_counts.max_sent = call.verdict.max_sums;
    host_counts.max_rows = call.verdict.max_rows;
    host_counts.max_held = call.verdict.max_held;
  }
  ptx::store_release_system(&host_counts.epoch, params.counts_epoch);
  return ok;
}

template <typename Link>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_between_kernel(const __grid_constant__ DispatchBetweenParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ CallBetween call;
  __shared__ uint64_t barriers[kWarps][RowMover::kStages];
  __shared__ int shared_status;
  const BetweenDomain& between = params.between;
  const Domain& domain = between.domain;
  const Grid& grid = between.grid;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kDispatchBetween, domain.rank, domain.timeout_ns, domain.control,
                      domain.num_ranks);
  const Link link(between.link, blockIdx.x);
  const uint32_t epoch = next_epoch(ptx::load_relaxed_gpu(&own.dispatch_epoch));
  const int warp = threadIdx.x / 32, num_cells = grid.num_domains * grid.ranks_per_domain;
  int* base = reinterpret_cast<int*>(shared + kRingsBytes);
  int* totals = base + num_cells;

  // Publish, and wait for what the others publish.
  const bool leads = blockIdx.x == 0;
  bool ok = true, is_same = true;
  if (leads) {
    if (params.host_counts != nullptr && threadIdx.x == 0) {
      ptx::store_relaxed_system(&params.host_counts->started, params.counts_epoch);
    }
    ok = tell_counts(params, waiter, link, epoch);
    ok &= spread_counts(params, waiter, link, epoch);
    ok = __syncthreads_and(ok);
  }
  ok &= receive_headers(params, waiter, epoch, call, &is_same);
  if (ok && is_same) ok = find_dispatch_bases_between(params, waiter, epoch, call, base, totals);

  // The first CTA decides with all domains, and publishes the decision.
  auto* decision = own_part<uint64_t>(between, between.layout.decisions);
  if (leads) {
    if (threadIdx.x == 0) call.verdict = judge(params, call, !ok || !is_same);
    __syncthreads();
    ok &= agree(params, waiter, link, call);
    ok = __syncthreads_and(ok);
    const CallStatus status = !ok || call.verdict.fails     ? kFailed
                              : call.verdict.lacks_capacity ? kNeedsCapacity
                                                            : kSent;
    if (threadIdx.x == 0) {
      shared_status = status;
      ptx::store_relaxed_system(decision, static_cast<uint64_t>(status) << 32 | epoch);
    }
    ok &= report(params, call, waiter, epoch, status);
  } else if (threadIdx.x == 0) {
    uint64_t word = static_cast<uint64_t>(kFailed) << 32;
    ok &= waiter_of_own(domain, KernelName::kDispatchBetween)
              .until_equal(decision, epoch, domain.rank, WaitTag::kGrid, &word);
    shared_status = static_cast<uint32_t>(word) == epoch ? static_cast<int>(word >> 32) : kFailed;
  }
  __syncthreads();

  // Send and forward, each warp in its role.
  if (shared_status == kSent) {
    RowMover mover(shared + warp * RowMover::kRingBytes, barriers[warp]);
    if (warp < kOwnWarps) {
      push_own_tokens(params, call, base, mover);
      mark_free_rows(params, call, threadIdx.x, kOwnWarps * 32);
    }
    if (warp < kOwnWarps + kSendWarps) {
      ok &= send_records(params, call, waiter, link, mover);
    } else {
      ok &= forward_records(params, call, base, waiter, link, mover);
    }
    mover.finish();
  }

  // The last CTA advances the streams, raises its flag at every rank of the domain, and waits for theirs.
  if (!finish_cta(own, ok)) return;
  for (int d = threadIdx.x; d < grid.num_domains; d += kThreads) {
    if (d == grid.domain_idx()) continue;
    const bool is_sent = shared_status == kSent;
    own_part<uint64_t>(between, between.layout.sent_chunks)[d] +=
        kControlChunks + (is_sent ? num_chunks(params, call.num_sent[d]) : 0);
    own_part<uint64_t>(between, between.layout.read_chunks)[d] +=
        kControlChunks + (is_sent ? num_chunks(params, call.num_records[d]) : 0);
  }
  if (threadIdx.x == 0) {
    waiter.sends(link.end_call([&] { return waiter.expired(); }), domain.rank);
    *own_part<uint32_t>(between, between.layout.items) = 0;
  }
  for (int r = threadIdx.x; r < domain.num_ranks && own.failed == 0; r += kThreads) {
    ptx::store_release_system(&domain.control[r]->rows_epoch[domain.rank], epoch);
  }
  for (int r = threadIdx.x; r < domain.num_ranks; r += kThreads) {
    waiter.until_epoch(&own.rows_epoch[r], epoch, r, WaitTag::kRows);
  }
  end_kernel(own, own.dispatch_epoch, epoch);
}

}  // namespace

void prepare_dispatch_between() {
  for_each_link([](auto link) { allow_shared_memory(dispatch_between_kernel<typename decltype(link)::type>); });
}

void launch_dispatch_between(const DispatchBetweenParams& params, int num_sms, cudaStream_t stream) {
  const int table_bytes = 2 * params.between.grid.num_ranks() * static_cast<int>(sizeof(int));
  const auto kernel =
      kernel_for(params.between.link, [](auto link) { return dispatch_between_kernel<typename decltype(link)::type>; });
  launch_kernel(LaunchKind::kCooperative, kernel, params, dim3(num_sms), kThreads, kRingsBytes + table_bytes, stream);
}

}  // namespace hybrid_ep
