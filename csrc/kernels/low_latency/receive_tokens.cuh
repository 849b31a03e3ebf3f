// The receive of a low-latency dispatch: the CTAs of a local expert walk through all routes, and copy the rows of that
// expert from their slots to the packed output. Legend and data flow: dispatch.cu.
#pragma once

#include "device/lanes.cuh"
#include "device/low_latency.cuh"
#include "device/nvfp4.cuh"
#include "device/ptx/launch.cuh"
#include "device/route_part.cuh"
#include "device/row_ring.cuh"
#include "kernels/low_latency/low_latency.h"

namespace hybrid_ep {
namespace {

constexpr int kReceiveThreads = 512;
constexpr int kReceiveWarps = kReceiveThreads / 32;
constexpr int kReceiveCtasPerSm = 2;
constexpr int kCopyStages = 3;  // of a warp
constexpr int kCopiesInFlight = 1;
constexpr int kCopyRingBytes = kReceiveWarps * kCopyStages * kSegmentBytes;
constexpr int kMaxFound = 2 * kReceiveThreads;  // tokens that a CTA has found and not yet copied
// A word that counts tokens in its lower half and rows in its upper half.
constexpr uint32_t kFurtherRow = 1u << 16, kTokenWithRow = kFurtherRow + 1;
static_assert(kReceiveThreads * kMaxTopk < 1 << 16);

// A token of the expert that a CTA has found. It has a row for each column of top-k that names the expert.
struct Found {
  int pair;          // source × M + token
  uint32_t columns;  // bit k: column k names the expert
  int row_offset;    // of the first column's row among the expert's; the rows of the others follow
};

// Waits for the parts of a token's route and calls use(i, part) with each. Masks the source if one does not come.
template <typename Use>
__device__ bool wait_for_route(const ReceiveTokensParams& params, const Waiter& waiter, uint32_t epoch, int pair,
                               Use&& use) {
  const LowLatencyDomain& domain = params.domain;
  const int num_parts = params.message.num_route_parts, source = pair / params.shape.max_tokens;
  const uint4* route = routes_of(domain, domain.rank) + static_cast<int64_t>(pair) * num_parts;
  for (int i = 0; i < num_parts; ++i) {
    RoutePart part;
    if (!waiter.until_equal(route + i, epoch, source, WaitTag::kRoutes, reinterpret_cast<uint4*>(&part))) {
      mask(domain, source);
      return false;
    }
    use(i, part);
  }
  return true;
}

// Waits for a token's route. Returns the columns that name the expert; none if the route does not come.
__device__ uint32_t find_columns(const ReceiveTokensParams& params, const Waiter& waiter, uint32_t epoch, int pair,
                                 int expert) {
  uint32_t columns = 0;
  const auto find = [&](int i, const RoutePart& part) {
    uint32_t in_part = 0;
#pragma unroll
    for (int k = 0; k < RoutePart::kColumns; ++k) {
      if (column_of(part, k) == expert) in_part |= 1u << k;
    }
    columns |= in_part << (RoutePart::kColumns * i);
  };
  return wait_for_route(params, waiter, epoch, pair, find) ? columns : 0;
}

using SegmentRing = RowRing<kCopiesInFlight>;

// Waits until rank r has begun to send. If it takes part, writes its LowLatencyBegun to *begun. One CTA notes the wait.
__device__ bool wait_for_rank(const ReceiveTokensParams& params, const Waiter& waiter, uint32_t epoch, int r,
                              bool notes_wait, uint4* begun) {
  const uint64_t started = ptx::clock_ns();
  const bool has_begun = wait_until_begun(params.domain, waiter, epoch, r, begun);
  if (params.wait_stats != nullptr && notes_wait) add_to_wait_stats(params.wait_stats, r, started);
  return has_begun;
}

// How many tokens a rank has, as its LowLatencyBegun says. 0 if its call is another one.
__device__ uint32_t num_tokens_of(const ReceiveTokensParams& params, const uint4& begun) {
  const LowLatencyCall& call = params.call;
  const bool is_other_call = begun.y != call.words[0] || begun.z != call.words[1];
  return is_other_call ? 0 : min(begun.x & 0xffffu, static_cast<uint32_t>(params.shape.max_tokens));
}

// Waits for the routes of all tokens, and decides which ranks take part, before rows are counted. Collective over the
// CTA. num_tokens is [R] shared memory for it to use.
__device__ void decide_by_routes(const ReceiveTokensParams& params, const Waiter& waiter, uint32_t epoch,
                                 bool notes_waits, uint32_t* num_tokens, bool* takes_part) {
  const int r = threadIdx.x, max_tokens = params.shape.max_tokens;
  if (r < params.domain.num_ranks) {
    uint4 begun = make_uint4(0, 0, 0, 0);
    takes_part[r] = wait_for_rank(params, waiter, epoch, r, notes_waits, &begun);
    num_tokens[r] = num_tokens_of(params, begun);
  }
  __syncthreads();
  for (int pair = r; pair < params.domain.num_ranks * max_tokens; pair += kReceiveThreads) {
    const int source = pair / max_tokens;
    if (pair % max_tokens >= static_cast<int>(num_tokens[source])) continue;
    if (!wait_for_route(params, waiter, epoch, pair, [](int, const RoutePart&) {})) takes_part[source] = false;
  }
  __syncthreads();
  if (r < params.domain.num_ranks) takes_part[r] = decide(params.domain, epoch, r, takes_part[r]);
}

// Adds to wait_stats by how much the wait for a rank's row, since `started`, exceeds the longest wait for this rank so
// far. So the longest wait of the call is added in total.
__device__ void note_wait(const ReceiveTokensParams& params, int source, uint64_t started) {
  const auto waited_us = static_cast<uint32_t>((ptx::clock_ns() - started) / 1000);
  const uint32_t before = atomicMax(&channel_of(params.domain, params.domain.rank).waited_us[source], waited_us);
  if (waited_us <= before) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(params.wait_stats + source), waited_us - before);
}

// Copies rows and scales of a local expert to the output once they have arrived, and records their source. A warp
// copies a segment of a row at a time. Rows beyond the capacity of an expert are dropped. kTiles: scales are stored in
// tiles, for NVFP4. kBesideSend: the send is a role of the same kernel.
template <bool kTiles, bool kBesideSend>
__device__ void copy_rows(const ReceiveTokensParams& params, const Waiter& waiter, uint32_t epoch, int local_expert,
                          const Found* found, int num_found, SegmentRing& ring) {
  const LowLatencyDomain& domain = params.domain;
  const int warp = threadIdx.x / 32, row_bytes = params.message.row_bytes, num_words = params.message.num_scale_words;
  const int capacity = params.shape.max_tokens * domain.num_ranks, first_row = local_expert * capacity;
  const auto slot_of = [&](const Found& row) {
    return buffer_of(domain, domain.rank) + static_cast<int64_t>(row.pair) * params.message.slot_bytes;
  };
  const uint64_t started = params.wait_stats != nullptr ? ptx::clock_ns() : 0;
  for (int i = threadIdx.x; i < num_found; i += kReceiveThreads) {
    const int pair = found[i].pair, source = pair / params.shape.max_tokens;
    if (!waiter.until_equal(flags_of(domain, domain.rank) + pair, epoch, source, WaitTag::kRows)) mask(domain, source);
    if (params.wait_stats != nullptr) note_wait(params, source, started);
  }
  __syncthreads();
  ptx::fence_global_for_bulk();  // lane 0 loads rows whose flags other lanes have waited for

  const int num_segments = (row_bytes + kSegmentBytes - 1) / kSegmentBytes, num_items = num_found * num_segments;
  int asked = warp;
  const auto ask = [&] {
    if (asked >= num_items) return;
    const int begin = asked % num_segments * kSegmentBytes;
    ring.fetch(slot_of(found[asked / num_segments]) + begin, min(kSegmentBytes, row_bytes - begin));
    asked += kReceiveWarps;
  };
  for (int i = 0; i < ring.num_ahead(); ++i) ask();
  for (int item = warp; item < num_items; item += kReceiveWarps) {
    const int begin = item % num_segments * kSegmentBytes;
    const Found& row = found[item / num_segments];
    const uint8_t* stage = ring.wait();
    if (threadIdx.x % 32 == 0) {
      int row_offset = row.row_offset;
      for (uint32_t left = row.columns; left != 0 && row_offset < capacity; left &= left - 1, ++row_offset) {
        ptx::bulk_store(params.rows + static_cast<int64_t>(first_row + row_offset) * row_bytes + begin, stage,
                        min(kSegmentBytes, row_bytes - begin));
      }
    }
    ring.release();
    ask();
  }
#pragma unroll 1  // or registers spill
  for (int item = threadIdx.x; item < num_found * num_words; item += kReceiveThreads) {
    const Found& row = found[item % num_found];
    const int word = item / num_found;
    const uint32_t scale = __ldcg(reinterpret_cast<const uint32_t*>(slot_of(row) + row_bytes) + word);
    int row_offset = row.row_offset;
    if constexpr (kTiles) {
      const int num_tiles = (capacity + kRowsPerTile - 1) / kRowsPerTile;
      uint32_t* scales = params.scales + static_cast<int64_t>(local_expert) * num_tiles * num_words * kRowsPerTile;
      for (uint32_t left = row.columns; left != 0 && row_offset < capacity; left &= left - 1, ++row_offset) {
        scales[(row_offset / kRowsPerTile * num_words + word) * kRowsPerTile + row_offset % 32 * 4 +
               row_offset % kRowsPerTile / 32] = scale;
      }
    } else {
      uint32_t* scales = params.scales + (static_cast<int64_t>(local_expert) * num_words + word) * capacity;
      for (uint32_t left = row.columns; left != 0 && row_offset < capacity; left &= left - 1)
        scales[row_offset++] = scale;
    }
  }
  // The send clears row_of.
  if constexpr (kBesideSend) {
    wait_for_other_role(channel_of(domain, domain.rank).send, waiter, epoch, domain.rank);
  } else {
    ptx::wait_for_previous_kernel();
  }
  for (int i = threadIdx.x; i < num_found; i += kReceiveThreads) {
    const Found& row = found[i];
    int row_offset = row.row_offset;
    for (uint32_t left = row.columns; left != 0 && row_offset < capacity; left &= left - 1, ++row_offset) {
      params.src_info[first_row + row_offset] = row.pair % params.shape.max_tokens;
      params.row_of[row.pair * params.shape.num_topk + __ffs(left) - 1] = first_row + row_offset;
    }
  }
}

// CTA `share` of the num_shares of a local expert.
template <bool kNvfp4, bool kBesideSend>
__device__ __forceinline__ void receive_tokens(const ReceiveTokensParams& params, int local_expert, int share,
                                               int num_shares, uint8_t* stages) {
  __shared__ uint32_t num_tokens[kMaxRanks];  // 0 of a rank that does not take part
  __shared__ bool takes_part[kMaxRanks];      // if ranks may be masked
  __shared__ int begin[kMaxRanks + 1];        // first row of each source
  __shared__ uint32_t warp_counts[kReceiveWarps];
  __shared__ Found found[kMaxFound];
  __shared__ uint64_t barriers[kReceiveWarps * kCopyStages];
  const LowLatencyDomain& domain = params.domain;
  const int num_ranks = domain.num_ranks, max_tokens = params.shape.max_tokens;
  const uint32_t epoch = next_epoch(channel_of(domain, domain.rank).receive);
  const Waiter waiter(domain.fault, KernelName::kLowLatencyDispatch, domain.rank, domain.timeout_ns);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const bool is_first_cta = local_expert + share == 0;
  if (domain.takes_masks) decide_by_routes(params, waiter, epoch, is_first_cta, num_tokens, takes_part);
  SegmentRing ring(stages + warp * kCopyStages * kSegmentBytes, barriers + warp * kCopyStages, kCopyStages,
                   kSegmentBytes, lane);
  bool is_other_call = false;
  if (tid < num_ranks) {
    const LowLatencyCall& call = params.call;
    uint4 begun = make_uint4(0, call.words[0], call.words[1], 0);  // of a rank that is left out: no tokens
    if (!domain.takes_masks) {
      wait_for_rank(params, waiter, epoch, tid, is_first_cta, &begun);
    } else if (takes_part[tid]) {
      begun = ptx::load_relaxed_system(begun_of(domain, domain.rank, tid));
    }
    num_tokens[tid] = num_tokens_of(params, begun);
    is_other_call = begun.y != call.words[0] || begun.z != call.words[1];
    if (is_other_call && is_first_cta) {
      report_other_call(domain.fault, KernelName::kLowLatencyDispatch, CallField::kShape, domain.rank, tid,
                        as_one(call.words[0], call.words[1]), as_one(begun.y, begun.z));
    }
    if constexpr (kNvfp4) {
      uint4 own = begun;
      wait_until_begun(domain, waiter, epoch, domain.rank, &own);
      const uint32_t mine = own.x >> 16;
      const bool is_other_scale = begun.w == epoch && begun.x >> 16 != mine;
      if (is_other_scale && is_first_cta) {
        report_other_call(domain.fault, KernelName::kLowLatencyDispatch, CallField::kGlobalScale, domain.rank, tid,
                          mine, begun.x >> 16);
      }
      is_other_call = is_other_call || is_other_scale;
    }
  }
  // If the calls of ranks differ, no row is used: where sizes differ, slots of one rank overlap slots of another.
  if (__syncthreads_or(is_other_call) && tid < num_ranks) num_tokens[tid] = 0;
  __syncthreads();

  const int num_local = params.shape.num_experts / num_ranks, expert = domain.rank * num_local + local_expert;
  const int num_pairs = num_ranks * max_tokens;  // also the capacity of an expert, in rows
  // Tokens and rows of the expert: a token has a row for each column that names it. Tokens of this CTA that are not
  // copied yet.
  int total = 0, num_rows = 0, num_found = 0;
  for (int first_pair = 0; first_pair < num_pairs; first_pair += kReceiveThreads) {
    const int pair = first_pair + tid, source = pair / max_tokens, token = pair % max_tokens;
    uint32_t columns = 0;
    if (pair < num_pairs && token < static_cast<int>(num_tokens[source])) {
      columns = find_columns(params, waiter, epoch, pair, expert);
    }
    // Counts of tokens, and in the upper half of rows.
    const unsigned here = __ballot_sync(kAllLanes, columns != 0);
    uint32_t count_of_warp = __popc(here) * kTokenWithRow;
    uint32_t count_before = __popc(here & ((1u << lane) - 1)) * kTokenWithRow;
    for (unsigned left = __ballot_sync(kAllLanes, (columns & (columns - 1)) != 0); left != 0; left &= left - 1) {
      const int its_lane = __ffs(left) - 1;
      const uint32_t further = (__popc(__shfl_sync(kAllLanes, columns, its_lane)) - 1) * kFurtherRow;
      count_of_warp += further;
      if (its_lane < lane) count_before += further;
    }
    if (lane == 0) warp_counts[warp] = count_of_warp;
    __syncthreads();
    const uint32_t its_count = lane < kReceiveWarps ? warp_counts[lane] : 0;
    const uint32_t count_here = __reduce_add_sync(kAllLanes, its_count);
    count_before += __reduce_add_sync(kAllLanes, lane < warp ? its_count : 0);
    const int before = count_before % kFurtherRow, num_here = count_here % kFurtherRow;
    const int row_offset = num_rows + count_before / kFurtherRow;
    if (pair < num_pairs && token == 0) begin[source] = min(row_offset, num_pairs);
    // The CTAs of an expert share its tokens round-robin: this one copies those with number % CTAs == share.
    const int skipped = (share + num_shares - total % num_shares) % num_shares;
    if (columns != 0 && before % num_shares == skipped) {
      found[num_found + before / num_shares] = {pair, columns, row_offset};
    }
    num_found += (num_here - skipped + num_shares - 1) / num_shares;
    total += num_here;
    num_rows += count_here / kFurtherRow;
    __syncthreads();
    if (first_pair + kReceiveThreads < num_pairs && num_found + kReceiveThreads <= kMaxFound) continue;
    copy_rows<kNvfp4, kBesideSend>(params, waiter, epoch, local_expert, found, num_found, ring);
    num_found = 0;
    __syncthreads();
  }
  if (share == 0) {
    if (tid == 0) {
      begin[num_ranks] = params.count[local_expert] = min(num_rows, num_pairs);
      if (num_rows > num_pairs) {
        report_fault(domain.fault, FaultKind::kOverflow, KernelName::kLowLatencyDispatch, WaitTag::kRows, domain.rank,
                     domain.rank, num_pairs, num_rows);
        atomicMax(params.num_too_many, num_rows);  // combine reports it to the other ranks
      }
    }
    __syncthreads();
    if (tid < num_ranks) {
      params.layout_range[static_cast<int64_t>(local_expert) * num_ranks + tid] =
          static_cast<int64_t>(begin[tid]) << 32 | (begin[tid + 1] - begin[tid]);
    }
  }
  if (is_first_cta && tid < num_ranks) params.num_received[tid] = num_tokens[tid];
  ptx::bulk_wait_read<0>();
  finish_quietly(channel_of(domain, domain.rank).receive, epoch, num_shares * num_local);
}

}  // namespace
}  // namespace hybrid_ep
