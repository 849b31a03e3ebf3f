// Dispatch inside a domain: layout, count exchange and push in one persistent launch.
//
//     topk_idx ─ count ─► send_slot ─ grid barrier ─► totals ─► every rank's control block ─ wait ─► first rows
//     x[t] ─ bulk load ─► shared memory ─ one bulk store per rank ─► row of every receiver ─► rows_epoch
//     experts, weights and scales of the same tokens ─ coalesced stores ─► the parts beside the rows
//
// A CTA counts a contiguous block of tokens and sends their metadata. Its first warps send rows of any tokens: they
// claim them by work index, because SMs do not get equal parts of the wire. Legend: T tokens, K top-k, E experts, R
// ranks, N received rows.
#include <cuda_runtime.h>

#include "device/epilogue.cuh"
#include "device/row_sender.cuh"
#include "kernels/dispatch/bases.cuh"
#include "kernels/dispatch/count.cuh"
#include "kernels/dispatch/report.cuh"

namespace hybrid_ep {
namespace {

constexpr int kCellsAhead = 4;  // of metadata that a thread loads at once

using DispatchSender = RowSender<kDispatchStoresInFlight>;

// Sends rows of tokens of any CTA. Each lane stores to the ranks that it serves.
template <int kRanksPerLane>
__device__ void send_rows(const DispatchParams& params, const DispatchRoutes& routes, DispatchSender& sender) {
  const int lane = threadIdx.x % 32, num_ranks = params.domain.num_ranks;
  const int32_t* dst_rows = params.pad_multiple > 0 ? params.dst_row : params.send_slot;
  // NOTE: loaded through L2, because another CTA may have written them, and this SM's L1 may hold the old line.
  const auto load_dst = [&](int token, int q) {
    const int r = lane + 32 * q;
    return r < num_ranks ? __ldcg(dst_rows + static_cast<int64_t>(token) * num_ranks + r) : -1;
  };
  const auto target_of = [&](int dst, int q) -> uint8_t* {
    if (dst < 0) return nullptr;
    const int r = lane + 32 * q, row = params.pad_multiple == 0 ? dst + routes.recv_base[r] : dst;
    if (row >= routes.call[r][CountRow::kRowLimit]) return nullptr;
    return routes.slot[r] + params.slot.rows + static_cast<int64_t>(row) * params.row_bytes;
  };
  sender.send<kRanksPerLane>(&params.domain.control[params.domain.rank]->sent_items, load_dst, target_of);
}

// Sends the scales of `count` rows that are one run at the receiver.
template <typename Vector>
__device__ void send_scales(const uint32_t* scales, const int32_t* list, uint32_t* target, int count, int num_scales,
                            int thread, int num_threads) {
  const int width = num_scales * sizeof(uint32_t) / sizeof(Vector), total = count * width;
  const auto* from = reinterpret_cast<const Vector*>(scales);
  auto* to = reinterpret_cast<Vector*>(target);
  for (int begin = thread; begin < total; begin += kCellsAhead * num_threads) {
    Vector vectors[kCellsAhead];
#pragma unroll
    for (int i = 0; i < kCellsAhead; ++i) {
      const int j = begin + i * num_threads, row = j / width;
      if (j < total) vectors[i] = from[static_cast<int64_t>(list[row]) * width + j - row * width];
    }
#pragma unroll
    for (int i = 0; i < kCellsAhead; ++i) {
      if (begin + i * num_threads < total) to[begin + i * num_threads] = vectors[i];
    }
  }
}

// Sends experts (or rows of copies) and weights of `count` rows that are one run at the receiver.
__device__ void send_experts(const DispatchParams& params, const int32_t* list, uint8_t* slot, int64_t first_row,
                             int count, int first_expert, int thread, int num_threads) {
  const int num_topk = params.num_topk, total = count * num_topk;
  auto* topk_idx = reinterpret_cast<int64_t*>(slot + params.slot.experts) + first_row * num_topk;
  auto* dst_row = reinterpret_cast<int32_t*>(slot + params.slot.experts) + first_row * num_topk;
  auto* weights = reinterpret_cast<float*>(slot + params.slot.weights) + first_row * num_topk;
  for (int begin = thread; begin < total; begin += kCellsAhead * num_threads) {
    int64_t expert[kCellsAhead];
    int row_of_copy[kCellsAhead];
    float weight[kCellsAhead];
#pragma unroll
    for (int i = 0; i < kCellsAhead; ++i) {
      const int j = begin + i * num_threads;
      if (j >= total) continue;
      const int row = j / num_topk, k = j - row * num_topk, token = list[row];
      const int64_t cell = static_cast<int64_t>(token) * num_topk + k;
      expert[i] = params.topk_idx[cell] - first_expert;
      row_of_copy[i] = params.pad_multiple > 0 ? params.expert_row[cell] : 0;
      weight[i] = params.has_weights ? params.topk_weights[cell] : 0.0f;
      if (expert[i] >= 0 && expert[i] < params.range_size) continue;
      expert[i] = row_of_copy[i] = -1;
      weight[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kCellsAhead; ++i) {
      const int j = begin + i * num_threads;
      if (j >= total) continue;
      if (params.pad_multiple > 0) {
        dst_row[j] = row_of_copy[i];
      } else {
        topk_idx[j] = expert[i];
      }
      if (params.has_weights) weights[j] = weight[i];
    }
  }
}

// Sends the metadata of rows. A CTA's rows for one rank are one run there, so stores are coalesced.
__device__ void send_metadata(const DispatchParams& params, const DispatchRoutes& routes) {
  const Domain& domain = params.domain;
  const int thread = threadIdx.x - params.num_send_warps * 32;
  const int num_threads = kDispatchThreads - params.num_send_warps * 32;
  const int num_topk = params.num_topk;
  for (int i = 0; i < domain.num_ranks; ++i) {
    const int peer = (domain.rank + i) % domain.num_ranks;
    uint8_t* slot = routes.slot[peer];
    const int32_t* list = params.send_list + static_cast<int64_t>(peer) * params.num_tokens + routes.cta_base[peer];
    const int64_t first_row = routes.recv_base[peer] + routes.cta_base[peer];
    // The bound of expert-major output counts copies; metadata is stored once per row.
    const int64_t limit = params.pad_multiple > 0 ? params.slot.num_records : routes.call[peer][CountRow::kRowLimit];
    const int count = static_cast<int>(min(static_cast<int64_t>(routes.cta_count[peer]), limit - first_row));
    if (params.scales != nullptr) {
      auto* scales = reinterpret_cast<uint32_t*>(slot + params.slot.scales) + first_row * params.num_scales;
      if (params.num_scales % 4 == 0) {
        send_scales<uint4>(params.scales, list, scales, count, params.num_scales, thread, num_threads);
      } else {
        send_scales<uint32_t>(params.scales, list, scales, count, params.num_scales, thread, num_threads);
      }
    }
    if (params.topk_idx == nullptr) continue;
    send_experts(params, list, slot, first_row, count, params.range_first + peer * params.range_step, thread,
                 num_threads);
  }
  if (params.topk_idx == nullptr || !params.is_bounded || params.pad_multiple > 0) return;
  // Rows between the last that arrives and the bound: no rank sends them, so they are marked here.
  const int64_t limit = min(params.row_limit, params.slot.capacity);
  const int64_t first_free = min(static_cast<int64_t>(routes.num_recv[domain.rank]), limit);
  uint8_t* slot = routes.slot[domain.rank];
  const int64_t offset = static_cast<int64_t>(blockIdx.x) * num_threads + thread;
  const int64_t step = static_cast<int64_t>(gridDim.x) * num_threads;
  for (int64_t j = first_free * num_topk + offset; j < limit * num_topk; j += step) {
    reinterpret_cast<int64_t*>(slot + params.slot.experts)[j] = -1;
    if (params.has_weights) reinterpret_cast<float*>(slot + params.slot.weights)[j] = 0.0f;
  }
}

// Counts this CTA's tokens, waits for the counts of all CTAs, and publishes the grid's to every rank. Returns whether
// all CTAs came.
__device__ bool publish_counts(const DispatchParams& params, const Waiter& waiter, ControlBlock& own, uint32_t epoch,
                               const Range warp_tokens, DispatchRoutes& routes, uint8_t* shared) {
  const int num_ranks = params.domain.num_ranks;
  bool ok = true;
  for (int r = threadIdx.x; r < num_ranks; r += kDispatchThreads) {
    routes.recv_base[r] = routes.num_recv[r] = 0;
    routes.other_column[r] = CountRow::kNumCallColumns;
  }
  if (threadIdx.x == 0) routes.num_sending_ctas = 0;
  if (params.topk_idx != nullptr) {
    count_tokens(params, warp_tokens, routes, shared);
    __syncthreads();
    sum_over_warps(params, routes, shared);
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::add_acq_rel_gpu(&own.arrived_ctas, 1);
      ok = waiter.until_count(&own.arrived_ctas, gridDim.x, WaitTag::kGrid);
    }
    ok = __syncthreads_and(ok);
    // The last threads do this while the others sum the counts to send.
    for (int r = kDispatchThreads - 1 - threadIdx.x; r < num_ranks; r += kDispatchThreads) {
      int before = 0, num_ctas = 0;
#pragma unroll 16
      for (int c = 0; c < static_cast<int>(gridDim.x); ++c) {
        const int count = __ldcg(&own.cta_counts[c][r]);
        before += c < static_cast<int>(blockIdx.x) ? count : 0;
        num_ctas = count > 0 ? c + 1 : num_ctas;
      }
      routes.cta_base[r] = before;
      atomicMax(&routes.num_sending_ctas, num_ctas);
    }
  }
  send_counts(params, epoch);
  __syncthreads();
  return ok;
}

// The decision on a call. All ranks decide alike, because they read the same words.
struct Decision {
  CallStatus status;
  bool ok;         // every wait has ended
  bool has_calls;  // the call of every rank came
};

// Reads the calls and counts of all ranks, and finds where this rank's rows go. If a slot is too small, calls differ or
// one is refused, no rank sends. `ok` is whether this CTA's earlier waits have ended. Collective over the CTA.
__device__ Decision decide(const DispatchParams& params, const Waiter& waiter, ControlBlock& own, uint32_t epoch,
                           DispatchRoutes& routes, int* expert_base, bool ok) {
  const int num_ranks = params.domain.num_ranks;
  Decision decision{};
  ok &= receive_calls(params, waiter, epoch, routes);
  if (params.topk_idx != nullptr && params.pad_multiple == 0 && threadIdx.x == kDispatchThreads - 1) {
    ok &= waiter.until_count(&own.routed_ctas, gridDim.x, WaitTag::kGrid);
  }
  decision.has_calls = ok = __syncthreads_and(ok);
  bool is_same = true, lacks_capacity = false;
  for (int r = threadIdx.x; r < num_ranks && ok; r += kDispatchThreads) is_same &= accepts_call(params, routes, r);
  is_same = __syncthreads_and(is_same);
  if (ok && is_same) ok = find_dispatch_bases(params, waiter, epoch, routes, expert_base);
  decision.ok = ok = __syncthreads_and(ok);
  for (int r = threadIdx.x; r < num_ranks && ok && is_same; r += kDispatchThreads) {
    lacks_capacity |= params.is_bounded ? params.common_bound > params.slot.capacity
                                        : routes.needed[r] > routes.call[r][CountRow::kRowLimit];
  }
  lacks_capacity = __syncthreads_or(lacks_capacity);
  decision.status = !ok || !is_same ? kFailed : lacks_capacity ? kNeedsCapacity : kSent;
  return decision;
}

template <int kRanksPerLane>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch_kernel(const __grid_constant__ DispatchParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ DispatchRoutes routes;
  __shared__ uint64_t barriers[kMaxSendWarps][kMaxStages];
  __shared__ int32_t tokens[kMaxSendWarps][kMaxStages];
  const Domain& domain = params.domain;
  ControlBlock& own = *domain.control[domain.rank];
  const Waiter waiter(domain.fault, KernelName::kDispatch, domain.rank, domain.timeout_ns, domain.control,
                      domain.num_ranks);
  const uint32_t epoch = next_epoch(ptx::load_relaxed_gpu(&own.dispatch_epoch));
  const int warp = threadIdx.x / 32;
  const bool makes_route = params.topk_idx != nullptr;

  const Range cta_tokens = share_of(params.num_tokens, blockIdx.x, gridDim.x);
  const Range split = share_of(cta_tokens.end - cta_tokens.begin, warp, kWarps);
  const Range warp_tokens{cta_tokens.begin + split.begin, cta_tokens.begin + split.end};
  int* expert_base = warp_expert_counts(shared, kWarps, params.num_experts);

  if (params.host_counts != nullptr && blockIdx.x + threadIdx.x == 0) {
    ptx::store_relaxed_system(&params.host_counts->started, params.counts_epoch);
  }
  bool ok = publish_counts(params, waiter, own, epoch, warp_tokens, routes, shared);

  // While the counts are in flight.
  const bool sends_rows = warp < params.num_send_warps;
  const int sender_idx = sends_rows ? warp : 0;
  const int num_stages = sends_rows ? params.num_stages : 0, sender_number = warp * gridDim.x + blockIdx.x;
  uint8_t* ring = shared + params.rings_begin + sender_idx * params.num_stages * params.row_bytes;
  // Tokens after the last one that goes to any rank are not loaded.
  const int num_rows =
      makes_route ? share_of(params.num_tokens, routes.num_sending_ctas - 1, gridDim.x).end : params.num_tokens;
  DispatchSender sender({params.rows, num_rows, params.row_bytes}, gridDim.x * params.num_send_warps, num_stages, ring,
                        barriers[sender_idx], tokens[sender_idx]);
  if (!params.rings_overlap) sender.begin(sender_number);
  if (makes_route) {
    finish_slots(params, warp_tokens, routes);
    if (params.pad_multiple == 0) {
      __syncthreads();
      if (threadIdx.x == 0) ptx::add_acq_rel_gpu(&own.routed_ctas, 1);
    }
  }

  const Decision decision = decide(params, waiter, own, epoch, routes, expert_base, ok);
  CallStatus status = decision.status;
  ok = decision.ok;

  // Send. The last warp first reports to the host.
  if (status == kSent && params.pad_multiple > 0 && makes_route) {
    finish_expert_rows(params, warp_tokens, shared, expert_base);
  }
  if (status == kFailed && makes_route) clear_route(params, cta_tokens);
  ptx::fence_shared_for_bulk();  // the rings may take over the expert counters' memory
  __syncthreads();
  if (params.rings_overlap && status == kSent) sender.begin(sender_number);
  if (status == kSent && makes_route && params.pad_multiple > 0) {
    if (threadIdx.x == 0) {
      ptx::add_acq_rel_gpu(&own.routed_ctas, 1);
      ok = waiter.until_count(&own.routed_ctas, gridDim.x, WaitTag::kGrid);
    }
    ok = __syncthreads_and(ok);
    if (!ok) status = kFailed;
  }
  if (blockIdx.x == 0 && warp == kWarps - 1) {
    report_pool(params, routes, decision.has_calls);
    ok &= report_counts(params, waiter, epoch, routes, status);
  }
  if (status != kSent) {
    sender.drop();
  } else if (sends_rows) {
    send_rows<kRanksPerLane>(params, routes, sender);
  } else {
    send_metadata(params, routes);
  }

  // The last CTA raises its flag at every rank, and waits for every rank's. A failed call raises none.
  if (!finish_cta(own, ok)) return;
  for (int r = threadIdx.x; r < domain.num_ranks && own.failed == 0; r += kDispatchThreads) {
    ptx::store_release_system(&domain.control[r]->rows_epoch[domain.rank], epoch);
  }
  for (int r = threadIdx.x; r < domain.num_ranks; r += kDispatchThreads) {
    waiter.until_epoch(&own.rows_epoch[r], epoch, r, WaitTag::kRows);
  }
  end_kernel(waiter, own, own.dispatch_epoch, epoch);
}

}  // namespace

void prepare_dispatch() {
  allow_shared_memory(dispatch_kernel<1>);
  allow_shared_memory(dispatch_kernel<kMaxRanksPerLane>);
}

void launch_dispatch(const DispatchParams& params, int num_sms, int shared_bytes, cudaStream_t stream) {
  const auto kernel = params.domain.num_ranks <= 32 ? dispatch_kernel<1> : dispatch_kernel<kMaxRanksPerLane>;
  launch_kernel(LaunchKind::kCooperative, kernel, params, num_sms, kDispatchThreads, shared_bytes, stream);
}

}  // namespace hybrid_ep
