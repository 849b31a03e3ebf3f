// Low-latency dispatch between domains: one kernel ships this rank's tokens to the peers, another one forwards the
// peers' tokens.
//
//     ship_tokens     slot (me, t) ─► record ─► chunk of each domain that has an expert of t ─ put, flag ─► peer
//                     route (me, t) ─► chunk of every domain
//     forward_tokens  chunk ─► route (source, t) of each rank of this domain
//                     record ─► slot (source, t) of each rank that has an expert of t, then its flag
//
// The kernels of one domain run before the first and behind the second: kernels/low_latency/dispatch.cu. Records take
// their places in a chunk as CTAs come, and name their tokens.
// Legend: T tokens, M most tokens of a rank, D domains, G ranks of a domain.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/ptx/launch.cuh"
#include "device/route_part.cuh"
#include "kernels/low_latency_between/peer_chunk.cuh"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

// Where a row is copied to: records of chunks, or slots of ranks and their flags.
struct Copies {
  int count;
  uint8_t* target[kMaxTopk];
  uint32_t* flag[kMaxTopk];
};

// Collective over the CTA. Slots are padded, so that the last 16 bytes are theirs.
__device__ void copy_slot(const uint8_t* slot, const LowLatencyMessage& message, const Copies& copies) {
  const int num_vectors = (message.row_bytes + 4 * message.num_scale_words + 15) / 16;
  for (int vector = threadIdx.x; vector < num_vectors; vector += kThreads) {
    const uint4 value = ptx::load_streaming(slot + 16 * vector);
    for (int i = 0; i < copies.count; ++i) reinterpret_cast<uint4*>(copies.target[i])[vector] = value;
  }
}

template <typename Link>
__global__ void __launch_bounds__(kThreads, 1) ship_tokens_kernel(const __grid_constant__ ShipTokensParams params) {
  __shared__ bool is_free[kMaxDomains];
  __shared__ Copies copies;
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const LowLatencyDomain& ranks = params.domain;
  const Grid& grid = params.peers.grid;
  const int tid = threadIdx.x;
  const uint32_t epoch = ptx::load_relaxed_gpu(&channel_of(ranks, ranks.rank).send.epoch);  // send_tokens has ended
  LowLatencyBetweenChannel& own = between_channel(params, ranks.rank);
  const Waiter waiter = waiter_of_send(ranks, KernelName::kLowLatencyDispatch);
  const Link link(params.link, blockIdx.x);
  const auto chunk_of = [&](int d) { return PeerChunk<Link>(params, waiter, link, epoch, d); };
  if (tid < grid.num_domains) is_free[tid] = !params.peers.is_near(tid) && chunk_of(tid).wait_free();
  __syncthreads();

  const TokenChunk parts = TokenChunk::of(params.message, params.num_tokens);
  const int64_t first_pair = static_cast<int64_t>(ranks.rank) * params.shape.max_tokens;
  const int num_parts = params.num_tokens * params.message.num_route_parts;
  const uint4* routes = routes_of(ranks, ranks.rank) + first_pair * params.message.num_route_parts;
  for (int i = blockIdx.x * kThreads + tid; i < num_parts; i += gridDim.x * kThreads) {
    const uint4 part = ptx::load_streaming(routes + i);
    for (int d = 0; d < grid.num_domains; ++d) {
      if (is_free[d]) reinterpret_cast<uint4*>(chunk_of(d).out() + kHeaderBytes)[i] = part;
    }
  }
  for (int token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
    if (tid < 32) {
      int64_t expert = -1;
      if (tid < params.shape.num_topk) {
        expert = params.topk_idx[static_cast<int64_t>(token) * params.shape.num_topk + tid];
      }
      const bool exists = expert >= 0 && expert < params.shape.num_experts;  // send_tokens reports the others
      const int rank = exists ? ExpertMap{params.shape.num_experts, ranks.num_ranks}.rank_of(expert) : -1;
      int domain = exists ? rank / grid.ranks_per_domain : -1;
      if (domain >= 0 && (!is_free[domain] || is_masked(ranks, rank))) domain = -1;
      const bool leads = __ffs(__match_any_sync(kAllLanes, domain)) - 1 == tid && domain >= 0;
      const unsigned leaders = __ballot_sync(kAllLanes, leads);
      if (leads) {
        uint8_t* chunk = chunk_of(domain).out();
        const uint32_t place = ptx::add_relaxed_gpu(&own.num_records[domain], 1);
        reinterpret_cast<uint32_t*>(chunk + parts.tokens)[place] = token;
        copies.target[__popc(leaders & ((1u << tid) - 1))] =
            chunk + parts.records + static_cast<int64_t>(place) * params.message.slot_bytes;
      }
      if (tid == 0) copies.count = __popc(leaders);
    }
    __syncthreads();
    const uint8_t* slot = buffer_of(ranks, ranks.rank) + (first_pair + token) * params.message.slot_bytes;
    copy_slot(slot, params.message, copies);
    __syncthreads();
  }

  if (!is_last_cta(own, gridDim.x)) return;
  if (tid < grid.num_domains) {
    const uint32_t num_records = __ldcg(&own.num_records[tid]);
    own.num_records[tid] = 0;  // of a peer that this CTA has given up, too: others may have counted
    if (is_free[tid] && !is_masked(ranks, chunk_of(tid).peer())) {
      const auto chunk = chunk_of(tid);
      auto& header = *reinterpret_cast<PeerHeader*>(chunk.out());
      *reinterpret_cast<uint4*>(&header.begun) = ptx::load_streaming(begun_of(ranks, ranks.rank, ranks.rank));
      header.num_records = num_records;
      chunk.send(parts.records + static_cast<int64_t>(num_records) * params.message.slot_bytes);
    }
  }
  end_call(params, waiter, link);
}

// Finds where a record of a token goes, and the flags to raise for it. One warp, a lane per column.
__device__ void find_copies(const ForwardTokensParams& params, const uint8_t* routes, int source, int token,
                            Copies& copies) {
  const LowLatencyDomain& ranks = params.domain;
  const Grid& grid = params.peers.grid;
  const int lane = threadIdx.x % 32;
  int rank = -1;
  if (lane < params.shape.num_topk) {
    const int part_idx = token * params.message.num_route_parts + lane / RoutePart::kColumns;
    const uint4 words = ptx::load_streaming(routes + 16 * part_idx);
    const RoutePart part{{words.x, words.y, words.z}, words.w};
    const int expert = column_of(part, lane % RoutePart::kColumns);
    if (expert < params.shape.num_experts) rank = ExpertMap{params.shape.num_experts, ranks.num_ranks}.rank_of(expert);
  }
  if (rank >= 0 && (rank / grid.ranks_per_domain != grid.domain_idx() || is_masked(ranks, rank))) rank = -1;
  const bool leads = __ffs(__match_any_sync(kAllLanes, rank)) - 1 == lane && rank >= 0;
  const unsigned leaders = __ballot_sync(kAllLanes, leads);
  if (leads) {
    const int i = __popc(leaders & ((1u << lane) - 1));
    const int64_t pair = static_cast<int64_t>(source) * params.shape.max_tokens + token;
    copies.target[i] = buffer_of(ranks, rank) + pair * params.message.slot_bytes;
    copies.flag[i] = flags_of(ranks, rank) + pair;
  }
  if (lane == 0) copies.count = __popc(leaders);
}

// Gives each rank of the domain what `source` has published, and its routes if its call is this rank's.
__device__ void forward_routes(const ForwardTokensParams& params, const uint8_t* chunk, int source, int num_tokens) {
  const LowLatencyDomain& ranks = params.domain;
  const Grid& grid = params.peers.grid;
  const int num_parts = num_tokens * params.message.num_route_parts, first = blockIdx.x * kThreads + threadIdx.x;
  const int step = (static_cast<int>(gridDim.x) - 1) * kThreads;
  for (int g = 0; g < grid.ranks_per_domain; ++g) {
    const int rank = grid.domain_idx() * grid.ranks_per_domain + g;
    if (is_masked(ranks, rank)) continue;
    uint4* routes = routes_of(ranks, rank) +
                    static_cast<int64_t>(source) * params.shape.max_tokens * params.message.num_route_parts;
    for (int i = first; i < num_parts; i += step) {
      ptx::store_relaxed_system(routes + i, ptx::load_streaming(chunk + kHeaderBytes + 16 * i));
    }
    if (first == 0) {
      ptx::store_relaxed_system(begun_of(ranks, rank, source), ptx::load_streaming(chunk));
    }
  }
}

template <typename Link>
__global__ void __launch_bounds__(kThreads, 1)
    forward_tokens_kernel(const __grid_constant__ ForwardTokensParams params) {
  __shared__ PeerHeader headers[kMaxDomains];
  __shared__ uint32_t waited_us[kMaxDomains];
  __shared__ bool came[kMaxDomains];
  __shared__ Copies copies;
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  const LowLatencyDomain& ranks = params.domain;
  const Grid& grid = params.peers.grid;
  const int tid = threadIdx.x, num_ctas = static_cast<int>(gridDim.x) - 1;
  const uint32_t epoch = next_epoch(channel_of(ranks, ranks.rank).receive);
  if (blockIdx.x == gridDim.x - 1) {
    const auto has_come = [&](int r) {
      return has_reached_epoch(ptx::load_relaxed_system(begun_of(ranks, ranks.rank, r)).w, epoch);
    };
    const auto wait_for = [&](const Waiter& waiter, int r) {
      uint4 begun;
      return waiter.until_epoch_relaxed(begun_of(ranks, ranks.rank, r), epoch, r, WaitTag::kRoutes, &begun);
    };
    wait_for_ranks(params, KernelName::kLowLatencyDispatch, epoch, params.wait_stats, has_come, wait_for);
    return;
  }
  const Waiter waiter(ranks.fault, KernelName::kLowLatencyDispatch, ranks.rank, ranks.timeout_ns);
  const Link link(params.link, blockIdx.x);
  const auto chunk_of = [&](int d) { return PeerChunk<Link>(params, waiter, link, epoch, d); };
  wait_for_chunks(params.peers, came, waited_us, chunk_of,
                  [&](int d, const PeerHeader& header) { headers[d] = header; });
  for (int i = 1; i < grid.num_domains; ++i) {
    const int d = (grid.domain_idx() + i) % grid.num_domains, source = grid.peer_in(d);
    if (!came[d]) continue;
    // Of a chunk of another call only the sizes are forwarded: the ranks that receive report the difference.
    const LowLatencyBegun& begun = headers[d].begun;
    const bool is_same = begun.call[0] == params.call.words[0] && begun.call[1] == params.call.words[1];
    const uint32_t most = is_same ? params.shape.max_tokens : 0;
    const int num_tokens = static_cast<int>(min(begun.tokens & 0xffffu, most));
    const uint8_t* chunk = chunk_of(d).in();
    forward_routes(params, chunk, source, num_tokens);
    const TokenChunk parts = TokenChunk::of(params.message, num_tokens);
    const int num_records = static_cast<int>(min(headers[d].num_records, static_cast<uint32_t>(num_tokens)));
    for (int record = blockIdx.x; record < num_records; record += num_ctas) {
      const auto token = static_cast<int>(__ldcg(reinterpret_cast<const uint32_t*>(chunk + parts.tokens) + record));
      if (tid < 32) find_copies(params, chunk + kHeaderBytes, source, token, copies);
      __syncthreads();
      copy_slot(chunk + parts.records + static_cast<int64_t>(record) * params.message.slot_bytes, params.message,
                copies);
      __syncthreads();
      if (tid < 32) {
        ptx::fence_acq_rel_system();
        if (tid < copies.count) ptx::store_relaxed_system(copies.flag[tid], epoch);
      }
      __syncwarp();
    }
  }

  if (!is_last_cta(between_channel(params, ranks.rank), num_ctas)) return;
  for (int d = 0; d < grid.num_domains; ++d) {
    if (params.peers.is_near(d)) continue;
    tell_forwarded(params, link, epoch, grid.peer_in(d), waited_us[d]);
    if (tid == 0) chunk_of(d).credit();  // a chunk that comes later is not read any more
  }
  free_own_memory(params, epoch);
  end_call(params, waiter, link);
}

}  // namespace

void prepare_low_latency_between_dispatch() {
  for_each_link([](auto link) {
    prefer_shared_memory(ship_tokens_kernel<typename decltype(link)::type>);
    prefer_shared_memory(forward_tokens_kernel<typename decltype(link)::type>);
  });
}

void launch_ship_tokens(const ShipTokensParams& params, int num_device_sms, cudaStream_t stream) {
  const auto kernel =
      kernel_for(params.link, [](auto link) { return ship_tokens_kernel<typename decltype(link)::type>; });
  launch_kernel(launch_kind(params.link), kernel, params, std::clamp(params.num_tokens, 1, num_device_sms), kThreads, 0,
                stream);
}

void launch_forward_tokens(const ForwardTokensParams& params, int num_device_sms, cudaStream_t stream) {
  const auto kernel =
      kernel_for(params.link, [](auto link) { return forward_tokens_kernel<typename decltype(link)::type>; });
  const int most = params.shape.max_tokens * (params.peers.grid.num_domains - 1);
  // The last CTA waits for ranks.
  launch_kernel(launch_kind(params.link), kernel, params, 1 + std::clamp(most, 1, num_device_sms - 1), kThreads, 0,
                stream);
}

}  // namespace hybrid_ep
