// Dispatch between domains: exchange of counts, both hops and the push in one persistent launch.
//
//     x[t] ─────────► this domain: a bulk store per rank ─────────────────────────────────► row of every receiver
//     x[t], top-k ─► records ─► chunk ─ link ─► peer: records ─ a bulk store per rank ──► row of every receiver
//
// A token crosses to another domain once. Its record has its destinations: a rank, and the token's index among those
// that its source sends there. So the peer can forward each record alone. Warps that forward never wait for warps that
// send, so a rank always returns credits. A warp that waits for a chunk pushes tokens that stay here. The indices come
// from index_tokens.cu. Legend: T tokens, K top-k, D domains, G ranks of a domain.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/replica_mapping.cuh"
#include "device/row_mover.cuh"
#include "device/work_index.cuh"
#include "kernels/between/records.cuh"
#include "kernels/dispatch_between/exchange.cuh"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

// Warps of a CTA by role. This rank's tokens that stay are pushed by all of them: by those that forward while they
// wait, and by each when its role has no work left.
constexpr int kSendWarps = 8, kForwardWarps = 8;
constexpr int kWarps = kSendWarps + kForwardWarps;
constexpr int kThreads = kWarps * 32;
constexpr int kRingsBytes = kWarps * RowMover::kRingBytes;

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

// Pushes this rank's tokens that stay in the domain. They need no other rank, so they fill the time that a warp would
// wait. Collective over a warp, as everything here.
class OwnTokens {
 public:
  __device__ OwnTokens(const DispatchBetweenParams& params, const CallBetween& call, const int* base, RowMover& mover)
      : params_(params),
        call_(call),
        base_(base + params.between.grid.domain_idx() * params.between.grid.ranks_per_domain),
        mover_(mover),
        items_(&params.between.domain.control[params.between.domain.rank]->sent_items) {
    advance();
  }

  __device__ bool is_done() const { return token_ < 0; }

  // Pushes the next token. `goes_on`: push() is called again before the mover moves any other row.
  __device__ void push(bool goes_on) {
    const int token = token_;
    const Column column = column_;
    advance();  // loads the next column while the row moves
    const uint8_t* next = goes_on && !is_done() ? row_of_token(params_, token_) : nullptr;
    push_token(params_, call_, base_, mover_, row_of_token(params_, token), next, scales_of_token(params_, token),
               column);
  }

 private:
  __device__ void advance() {
    const int domain = params_.between.grid.domain_idx(), i = items_.take();
    const int64_t list = params_.parts.domain_list + static_cast<int64_t>(domain) * params_.num_tokens;
    token_ = i < call_.num_sent[domain] ? params_.route[list + i] : -1;
    if (!is_done()) column_ = column_of_token(params_, token_);
  }

  const DispatchBetweenParams& params_;
  const CallBetween& call_;
  const int* base_;
  RowMover& mover_;
  WorkIndices<> items_;
  int token_ = -1;
  Column column_{};
};

// Sends records to the peers. Returns false if a peer gives no credit.
template <typename Link>
__device__ bool send_records(const DispatchBetweenParams& params, const CallBetween& call, const Waiter& waiter,
                             const Link& link, RowMover& mover) {
  const BetweenDomain& between = params.between;
  const int lane = threadIdx.x % 32, size = between.grid.ranks_per_domain;
  const RecordLayout& layout = params.record;
  Records records(between.grid, layout, kControlChunks, call.num_sent,
                  &between.domain.control[between.domain.rank]->summed_tokens, kSendWarps * gridDim.x);
  Record record, next;
  int token = -1, next_token = -1;
  Column column, next_column;
  uint8_t* target = nullptr;  // of the record
  const auto load = [&](const Record& of, int& its_token, Column& its_column) {
    its_token = params.route[params.parts.domain_list + static_cast<int64_t>(of.domain) * params.num_tokens + of.index];
    its_column = column_of_token(params, its_token);
  };
  bool has_record = records.next(record);
  if (has_record) load(record, token, column);
  while (has_record) {
    const ChunkStream<Link> stream(between, waiter, link, record.domain, call.first);
    if (record.is_first()) {
      if (!__all_sync(kAllLanes, lane > 0 || stream.wait_free(record.chunk))) return false;
      __syncwarp();
      target = stream.send_slot(record.chunk) + record.index % layout.per_chunk * layout.num_bytes;
    }
    const bool has_next = records.next(next);
    if (has_next) load(next, next_token, next_column);  // while the row moves
    mover.move(row_of_token(params, token), params.row_bytes, lane == 0 ? target : nullptr,
               has_next ? row_of_token(params, next_token) : nullptr);
    for (int s = lane; s < params.num_scales; s += 32) {
      reinterpret_cast<uint32_t*>(target + layout.scales)[s] = scales_of_token(params, token)[s];
    }
    if (lane < params.num_topk) {
      const bool goes =
          column.destination != kNowhere && rank_of_destination(column.destination) / size == record.domain;
      reinterpret_cast<uint32_t*>(target + layout.destinations)[lane] = goes ? column.destination : kNowhere;
      if (params.makes_route) reinterpret_cast<int32_t*>(target + layout.experts)[lane] = column.expert;
      if (params.has_weights) reinterpret_cast<float*>(target + layout.weights)[lane] = column.weight;
    }
    if (record.is_last()) {
      const int num_rows = record.num_chunk_records;
      mover.finish();
      if (!stream.write_rows(record.chunk, record.part_size(), num_rows, num_rows * layout.num_bytes)) return false;
    }
    target += layout.num_bytes;
    has_record = has_next;
    record = next;
    token = next_token;
    column = next_column;
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

// Forwards records of the peers, and pushes own tokens while no record has come. Returns false if a record does not
// come.
template <typename Link>
__device__ bool forward_records(const DispatchBetweenParams& params, const CallBetween& call, const int* base,
                                const Waiter& waiter, const Link& link, RowMover& mover, OwnTokens& own_tokens) {
  const BetweenDomain& between = params.between;
  const int lane = threadIdx.x % 32, size = between.grid.ranks_per_domain;
  const RecordLayout& layout = params.record;
  Records records(between.grid, layout, kControlChunks, call.num_records,
                  own_part<uint32_t>(between, between.layout.items), kForwardWarps * gridDim.x);
  Record record, next;
  const uint8_t *row = nullptr, *next_row = nullptr;
  Column column, next_column;
  const auto row_of = [&](const Record& of) {
    const ChunkStream<Link> stream(between, waiter, link, of.domain, call.first);
    return stream.chunk(of.chunk) + of.index % layout.per_chunk * layout.num_bytes;
  };
  const auto is_here = [&](const Record& of) {  // then the warp may load it
    const ChunkStream<Link> stream(between, waiter, link, of.domain, call.first);
    const bool is_here = __ballot_sync(kAllLanes, lane == 0 && stream.is_here(of.chunk)) != 0;
    __syncwarp();  // passes on what lane 0 has acquired; a vote orders no memory
    if (is_here) ptx::fence_global_for_bulk();
    return is_here;
  };
  bool has_record = records.next(record);
  while (has_record) {
    const ChunkStream<Link> stream(between, waiter, link, record.domain, call.first);
    if (row == nullptr) {
      for (bool waits = !is_here(record); waits && !own_tokens.is_done();) {
        waits = !is_here(record);
        own_tokens.push(waits);
      }
      if (!__all_sync(kAllLanes, lane > 0 || stream.wait(record.chunk))) return false;
      __syncwarp();
      ptx::fence_global_for_bulk();
      row = row_of(record);
      column = column_of_record(params, row);
    }
    const bool has_next = records.next(next);
    next_row = !has_next ? nullptr : !next.is_first() ? row + layout.num_bytes : is_here(next) ? row_of(next) : nullptr;
    if (next_row != nullptr) next_column = column_of_record(params, next_row);  // in flight during the push
    if (params.makes_route && lane < params.num_topk) {
      const int64_t held = call.held_begin[record.domain] + record.index;
      params.route[params.parts.held + held * params.num_topk + lane] = static_cast<int>(column.destination);
    }
    push_token(params, call, base + record.domain * size, mover, row, next_row,
               reinterpret_cast<const uint32_t*>(row + layout.scales), column);
    if (record.is_last()) {
      __syncwarp();
      const bool ok = lane > 0 || stream.read_rows(record.chunk, record.part_size(), record.num_chunk_records);
      if (!__all_sync(kAllLanes, ok)) return false;
    }
    has_record = has_next;
    record = next;
    row = next_row;
    column = next_column;
  }
  return true;
}

// Marks the rows between the last that arrives and the bound: no rank sends them.
__device__ void mark_free_rows(const DispatchBetweenParams& params, const CallBetween& call) {
  if (!params.makes_route || !params.is_bounded) return;
  const int own = params.between.domain.rank;
  const int64_t begin = min(call.needed[own], params.row_limit) * static_cast<int64_t>(params.num_topk);
  const int64_t end = params.row_limit * static_cast<int64_t>(params.num_topk);
  for (int64_t i = begin + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) {
    reinterpret_cast<int64_t*>(call.slot[own] + params.slot.experts)[i] = -1;
    if (params.has_weights) reinterpret_cast<float*>(call.slot[own] + params.slot.weights)[i] = 0.0f;
  }
}

// Reports to the host and to later calls; called by the first CTA. Empties the route of a failed call, unless an
// earlier call has made the route.
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
  __shared__ int shared_status, num_control_read[kMaxDomains];
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
    for (int d = threadIdx.x; d < grid.num_domains; d += kThreads) num_control_read[d] = 0;
    __syncthreads();
    ok = tell_counts(params, waiter, link, epoch);
    ok &= spread_counts(params, waiter, link, epoch, num_control_read);
    ok = __syncthreads_and(ok);
  }
  ok &= receive_headers(params, waiter, epoch, call, &is_same);
  if (ok && is_same) ok = find_dispatch_bases_between(params, waiter, epoch, call, base, totals);

  // The first CTA decides with all domains, and publishes the decision.
  auto* decision = own_part<uint64_t>(between, between.layout.decisions);
  if (leads) {
    if (threadIdx.x == 0) call.verdict = judge(params, call, !ok || !is_same);
    __syncthreads();
    ok &= agree(params, waiter, link, call, num_control_read);
    ok = __syncthreads_and(ok);
    const CallStatus status = !ok || call.verdict.fails     ? kFailed
                              : call.verdict.lacks_capacity ? kNeedsCapacity
                                                            : kSent;
    if (threadIdx.x == 0) {
      shared_status = status;
      ptx::store_relaxed_system(decision, static_cast<uint64_t>(status) << 32 | epoch);
    }
    ok &= return_control_chunks(params, waiter, link, call, num_control_read);
    ok &= report(params, call, waiter, epoch, status);
  } else if (threadIdx.x == 0) {
    uint64_t word = static_cast<uint64_t>(kFailed) << 32;
    ok &= waiter_of_own(domain, KernelName::kDispatchBetween)
              .until_equal(decision, epoch, domain.rank, WaitTag::kGrid, &word);
    shared_status = static_cast<uint32_t>(word) == epoch ? static_cast<int>(word >> 32) : kFailed;
  }
  __syncthreads();

  if (shared_status == kFailed && params.mapping_checksum != nullptr) {
    uint8_t* slot = domain.arena[domain.rank] + params.slot_idx * domain.slot_bytes;
    clear_rows(slot + params.slot.rows, static_cast<int64_t>(params.row_limit) * params.row_bytes);
  }

  // Send and forward, each warp in its role. A CTA that has given up does not know where rows go.
  if (ok && shared_status == kSent) {
    RowMover mover(shared + warp * RowMover::kRingBytes, barriers[warp]);
    if (warp < kSendWarps) ok &= send_records(params, call, waiter, link, mover);
    OwnTokens own_tokens(params, call, base, mover);
    if (warp >= kSendWarps) ok &= forward_records(params, call, base, waiter, link, mover, own_tokens);
    while (!own_tokens.is_done()) own_tokens.push(true);
    mark_free_rows(params, call);
    mover.finish();
  }

  // The last CTA advances the streams, raises its flag at every rank of the domain, and waits for theirs.
  if (!finish_cta(own, ok)) return;
  for (int d = threadIdx.x; d < grid.num_domains; d += kThreads) {
    if (d == grid.domain_idx()) continue;
    const bool is_sent = shared_status == kSent;
    advance_stream(between, d, call.num_control[d] + (is_sent ? num_chunks(params.record, call.num_sent[d]) : 0),
                   call.num_control[d] + (is_sent ? num_chunks(params.record, call.num_records[d]) : 0));
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
  end_kernel(waiter, own, own.dispatch_epoch, epoch);
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
