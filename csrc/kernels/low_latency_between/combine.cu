// Low-latency combine between domains: one kernel ships rows of other domains' tokens to the peers there, another one
// forwards the peers' rows.
//
//     ship_rows     packed rows of tokens of a domain ─► records, and their places ─ put, flag ─► peer there
//     forward_rows  record ─► row (token, column) of its source, then the flag of the peer at every rank of this domain
//
// The kernels of one domain run beside the first and behind the second: kernels/low_latency/combine.cu. Rows of one
// expert that go to one domain stand in a run, because packed rows are in the order of source ranks. So the number of
// a record follows from the ranges of its expert, and rows are shipped one by one: none are summed.
// Legend: T tokens, K top-k, M most tokens of a rank, LE local experts, R ranks, D domains, G ranks of a domain.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/logfmt.cuh"
#include "device/ptx/launch.cuh"
#include "kernels/low_latency_between/peer_chunk.cuh"

namespace hybrid_ep {
namespace {

constexpr int kMaxLocalExperts = kMaxExperts / 2;  // of two ranks

// The rows of local expert e that go to a domain: its rows [begin[e], begin[e] + count), of which the first is record
// number first[e].
struct Runs {
  int begin[kMaxLocalExperts], first[kMaxLocalExperts + 1];
};

// Writes the tables without the rows of other domains.
__device__ void write_own_tables(const ShipRowsParams& params) {
  const Grid& grid = params.peers.grid;
  const int per_rank = params.shape.max_tokens * params.shape.num_topk, num_ranks = grid.num_ranks();
  const auto is_own = [&](int rank) { return params.peers.is_in_domain(rank); };
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_ranks * per_rank; i += gridDim.x * kThreads) {
    params.own_row_of[i] = is_own(i / per_rank) ? params.row_of[i] : -1;
  }
  const int r = threadIdx.x;
  if (blockIdx.x == 0 && r < num_ranks) params.own_num_received[r] = is_own(r) ? params.num_received[r] : 0;
}

// Collective over the CTA.
__device__ void find_runs(const ShipRowsParams& params, int domain, Runs& runs) {
  const int size = params.peers.grid.ranks_per_domain, num_ranks = params.domain.num_ranks;
  const int num_local = params.shape.num_experts / num_ranks;
  for (int e = threadIdx.x; e < num_local; e += kThreads) {
    const int64_t* ranges = params.layout_range + static_cast<int64_t>(e) * num_ranks + domain * size;
    int count = 0;
    for (int g = 0; g < size; ++g) count += static_cast<int>(ranges[g]);
    runs.begin[e] = static_cast<int>(ranges[0] >> 32);
    runs.first[e + 1] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    runs.first[0] = 0;
    for (int e = 0; e < num_local; ++e) runs.first[e + 1] += runs.first[e];
  }
  __syncthreads();
}

// The destination of a packed row of an expert. Collective over the warp.
__device__ RowPlace find_place(const ShipRowsParams& params, int domain, int expert, int row) {
  const LowLatencyShape& shape = params.shape;
  const int size = params.peers.grid.ranks_per_domain, num_ranks = params.domain.num_ranks, lane = threadIdx.x % 32;
  const int64_t* ranges = params.layout_range + static_cast<int64_t>(expert) * num_ranks + domain * size;
  int source = 0;
  for (int g = lane; g < size; g += 32) {
    const int begin = static_cast<int>(ranges[g] >> 32), count = static_cast<int>(ranges[g]);
    if (row >= begin && row < begin + count) source = g;
  }
  source = __reduce_max_sync(kAllLanes, source);
  const int packed_row = expert * shape.max_tokens * num_ranks + row, token = params.src_info[packed_row];
  const int64_t pair = static_cast<int64_t>(domain * size + source) * shape.max_tokens + token;
  const bool is_column =
      lane < shape.num_topk && params.row_of[pair * shape.num_topk + min(lane, shape.num_topk - 1)] == packed_row;
  return {source, __reduce_max_sync(kAllLanes, is_column ? lane : 0), token};
}

// Copies a row as it crosses. Collective over the warp.
__device__ void copy_row(const uint8_t* row, uint8_t* record, int hidden, bool is_logfmt) {
  if (is_logfmt) {
    send_as_logfmt(row, {record, hidden}, 0, 2 * hidden);
    return;
  }
  for (int vector = threadIdx.x % 32; vector < hidden / 8; vector += 32) {
    reinterpret_cast<uint4*>(record)[vector] = ptx::load_streaming(row + 16 * vector);
  }
}

template <typename Link>
__global__ void __launch_bounds__(kThreads, 1) ship_rows_kernel(const __grid_constant__ ShipRowsParams params) {
  __shared__ bool is_free[kMaxDomains];
  __shared__ int num_rows[kMaxDomains];
  __shared__ Runs runs;
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  if (params.own_row_of != nullptr) write_own_tables(params);
  if (!params.ships) return;
  const LowLatencyDomain& ranks = params.domain;
  const Grid& grid = params.peers.grid;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const uint32_t last_epoch = ptx::load_relaxed_gpu(&channel_of(ranks, ranks.rank).send.epoch);
  const uint32_t epoch = params.follows_own ? last_epoch : next_epoch(last_epoch);
  const Waiter waiter = waiter_of_send(ranks, KernelName::kLowLatencyCombine);
  const Link link(params.link, blockIdx.x);
  const auto chunk_of = [&](int d) { return PeerChunk<Link>(params, waiter, link, epoch, d); };
  if (tid < grid.num_domains) is_free[tid] = !params.peers.is_near(tid) && chunk_of(tid).wait_free();
  __syncthreads();
  const int num_local = params.shape.num_experts / ranks.num_ranks,
            capacity = params.shape.max_tokens * ranks.num_ranks;
  const int row_bytes = 2 * params.shape.hidden, record_bytes = crossing_bytes(params.shape.hidden, params.use_logfmt);
  for (int i = 1; i < grid.num_domains; ++i) {
    const int d = (grid.domain_idx() + i) % grid.num_domains;
    if (params.peers.is_near(d)) continue;
    find_runs(params, d, runs);
    const int count = runs.first[num_local];
    if (tid == 0) num_rows[d] = count;
    if (is_free[d]) {
      uint8_t* chunk = chunk_of(d).out();
      int expert = 0;
      for (int record = blockIdx.x * kWarps + warp; record < count; record += gridDim.x * kWarps) {
        while (record >= runs.first[expert + 1]) ++expert;
        const int row = runs.begin[expert] + record - runs.first[expert];
        const RowPlace place = find_place(params, d, expert, row);
        if (lane == 0) reinterpret_cast<uint32_t*>(chunk + kHeaderBytes)[record] = place.pack();
        copy_row(params.rows + (static_cast<int64_t>(expert) * capacity + row) * row_bytes,
                 chunk + rows_begin(count) + static_cast<int64_t>(record) * record_bytes, params.shape.hidden,
                 params.use_logfmt);
      }
    }
    __syncthreads();
  }

  if (!is_last_cta(between_channel(params, ranks.rank), gridDim.x)) return;
  if (tid < grid.num_domains && is_free[tid]) {
    const auto chunk = chunk_of(tid);
    uint32_t value = kNoSums | (params.use_logfmt ? kLogFmtBit : 0);
    const uint32_t of_own = ptx::load_acquire_system(sent_of(ranks, ranks.rank, ranks.rank)).x;
    const auto num_too_many = static_cast<uint32_t>(*params.num_too_many);
    if (num_too_many != 0) value = kTooManyRowsBit | num_too_many;
    if (params.follows_own && of_own >= kNoSignalBit) value = of_own;
    auto& header = *reinterpret_cast<PeerHeader*>(chunk.out());
    header.num_records = num_rows[tid];
    header.sent = {value, *params.number, epoch};
    if (!is_masked(ranks, chunk.peer())) {
      chunk.send(rows_begin(num_rows[tid]) + static_cast<int64_t>(num_rows[tid]) * record_bytes);
    }
  }
  end_call(params, waiter, link);
}

template <typename Link>
__global__ void __launch_bounds__(kThreads, 1) forward_rows_kernel(const __grid_constant__ ForwardRowsParams params) {
  __shared__ uint32_t num_records[kMaxDomains], waited_us[kMaxDomains];
  __shared__ LowLatencySent sent[kMaxDomains];
  __shared__ bool came[kMaxDomains];
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const LowLatencyDomain& ranks = params.domain;
  const LowLatencyShape& shape = params.shape;
  const Grid& grid = params.peers.grid;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, num_ctas = static_cast<int>(gridDim.x) - 1;
  const int first_rank = grid.domain_idx() * grid.ranks_per_domain;
  const uint32_t epoch = next_epoch(channel_of(ranks, ranks.rank).receive);
  if (blockIdx.x == gridDim.x - 1) {
    const auto has_come = [&](int r) {
      return has_reached_epoch(ptx::load_relaxed_system(sent_of(ranks, ranks.rank, r)).w, epoch);
    };
    const auto wait_for = [&](const Waiter& waiter, int r) {
      uint4 words;
      return waiter.until_epoch(sent_of(ranks, ranks.rank, r), epoch, r, WaitTag::kPartialRows, &words);
    };
    wait_for_ranks(params, KernelName::kLowLatencyCombine, epoch, params.wait_stats, has_come, wait_for);
    return;
  }
  const Waiter waiter(ranks.fault, KernelName::kLowLatencyCombine, ranks.rank, ranks.timeout_ns);
  const Link link(params.link, blockIdx.x);
  const auto chunk_of = [&](int d) { return PeerChunk<Link>(params, waiter, link, epoch, d); };
  wait_for_chunks(params.peers, came, waited_us, chunk_of, [&](int d, const PeerHeader& header) {
    const auto most = static_cast<uint32_t>(grid.ranks_per_domain * shape.max_tokens * shape.num_topk);
    num_records[d] = min(header.num_records, most);
    sent[d] = header.sent;
  });
  const int row_bytes = 2 * shape.hidden;
  for (int i = 1; i < grid.num_domains; ++i) {
    const int d = (grid.domain_idx() + i) % grid.num_domains;
    // If the rows cannot be used, only the flag is forwarded.
    if (!came[d] || sent[d].value > (kNoSums | kLogFmtBit)) continue;
    const uint8_t* chunk = chunk_of(d).in();
    const int record_bytes = crossing_bytes(shape.hidden, (sent[d].value & kLogFmtBit) != 0);
    const uint8_t* rows = chunk + rows_begin(num_records[d]);
    for (int record = blockIdx.x * kWarps + warp; record < static_cast<int>(num_records[d]);
         record += num_ctas * kWarps) {
      const RowPlace place = RowPlace::unpack(__ldcg(reinterpret_cast<const uint32_t*>(chunk + kHeaderBytes) + record));
      const int source = first_rank + place.domain_rank;
      const bool exists =
          place.domain_rank < grid.ranks_per_domain && place.token < shape.max_tokens && place.column < shape.num_topk;
      if (!exists || is_masked(ranks, source)) continue;
      const int64_t row = static_cast<int64_t>(place.token) * shape.num_topk + place.column;
      auto* target = reinterpret_cast<uint4*>(buffer_of(ranks, source) + row * row_bytes);
      const auto* record_begin = reinterpret_cast<const uint4*>(rows + static_cast<int64_t>(record) * record_bytes);
      for (int vector = lane; vector < record_bytes / 16; vector += 32)
        target[vector] = ptx::load_streaming(record_begin + vector);
    }
  }

  if (!is_last_cta(between_channel(params, ranks.rank), num_ctas)) return;
  for (int i = 1; i < grid.num_domains; ++i) {
    const int d = (grid.domain_idx() + i) % grid.num_domains, source = grid.peer_in(d), rank = first_rank + tid;
    if (params.peers.is_near(d)) continue;
    // A source that any CTA has given up is masked: that CTA has not forwarded its share of the rows.
    if (came[d] && !is_masked(ranks, source) && tid < grid.ranks_per_domain && !is_masked(ranks, rank)) {
      ptx::fence_acq_rel_system();
      ptx::store_relaxed_system(sent_of(ranks, rank, source), reinterpret_cast<const uint4&>(sent[d]));
    }
    tell_forwarded(params, link, epoch, source, waited_us[d]);
    if (tid == 0) chunk_of(d).credit();  // a chunk that comes later is not read any more
  }
  free_own_memory(params, epoch);
  end_call(params, waiter, link);
}

}  // namespace

void launch_ship_rows(const ShipRowsParams& params, int num_device_sms, cudaStream_t stream) {
  const auto kernel =
      kernel_for(params.link, [](auto link) { return ship_rows_kernel<typename decltype(link)::type>; });
  launch_kernel(launch_kind(params.link), kernel, params, num_device_sms, kThreads, 0, stream);
}

void launch_forward_rows(const ForwardRowsParams& params, int num_device_sms, cudaStream_t stream) {
  const auto kernel =
      kernel_for(params.link, [](auto link) { return forward_rows_kernel<typename decltype(link)::type>; });
  // The last CTA waits for ranks.
  launch_kernel(launch_kind(params.link), kernel, params, num_device_sms, kThreads, 0, stream);
}

}  // namespace hybrid_ep
