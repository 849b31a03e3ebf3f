// Low-latency dispatch: a CTA per token on the way out and some CTAs per local expert on the way in. They are CTAs of
// one kernel, those that send first, or with a hook of two.
//
//     x[t] ─► (quantised) ─► slot (me, t) of each rank that has an expert of t ─┐
//     topk_idx[t] ─────────► route (me, t) of every rank ─► index of each copy ─┴─ flag ─► rows[e][index] ◄─ slots
//
// A row crosses once for each destination rank, not once for each expert. The slot is the token's own index, so the
// send needs no counts. The receiver finds output rows from the routes: every CTA walks through all routes in the order
// of source rank and token, and copies its share of its expert's rows. A route is small and has its epoch, so the walk
// runs while rows are on the wire.
// Legend: T tokens of this rank, M most tokens of a rank, K top-k, R ranks, W words of scales.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/fp8.cuh"
#include "device/lanes.cuh"
#include "device/low_latency.cuh"
#include "device/nvfp4.cuh"
#include "device/ptx/launch.cuh"
#include "device/route_part.cuh"
#include "device/row_ring.cuh"
#include "kernels/launch.h"
#include "kernels/low_latency/low_latency.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kSendThreads = 512;
constexpr int kSendCtasPerSm = 2;
constexpr int kRouteWarp = kSendThreads / 32 - 1;  // the one with the fewest vectors
constexpr int kMaxOwed = 256;                      // flags that a CTA raises together, after its rows are stored
constexpr int kReceiveThreads = 512;
constexpr int kReceiveWarps = kReceiveThreads / 32;
constexpr int kReceiveCtasPerSm = 2;
static_assert(kReceiveThreads == kSendThreads && kReceiveCtasPerSm == kSendCtasPerSm);  // CTAs of one kernel
constexpr int kMaxRouteParts = (kMaxTopk + RoutePart::kColumns - 1) / RoutePart::kColumns;
constexpr int kCopyStages = 3;  // of a warp
constexpr int kCopiesInFlight = 1;
constexpr int kCopyRingBytes = kReceiveWarps * kCopyStages * kSegmentBytes;
constexpr int kMaxFound = 2 * kReceiveThreads;  // tokens that a CTA has found and not yet copied
// A word that counts tokens in its lower half and rows in its upper half.
constexpr uint32_t kFurtherRow = 1u << 16, kTokenWithRow = kFurtherRow + 1;
static_assert(kReceiveThreads * kMaxTopk < 1 << 16);

// How rows leave: as they are, as e4m3 or as e2m1, with scales.
enum class Rows { kPlain, kFp8, kNvfp4 };
template <Rows kRows>
constexpr int kVectorsIn = kRows == Rows::kPlain ? 1
                           : kRows == Rows::kFp8 ? 2
                                                 : 4;  // 16 bytes, for 16 of the message
template <Rows kRows>
constexpr int kMaxScaleWords =
    kMaxRowBytes / 2 / (kRows == Rows::kNvfp4 ? kChannelsPerBlock * kScalesPerWord : kChannelsPerScale);

// Where one token goes.
struct Targets {
  int count;
  uint8_t* slot[kMaxTopk];
  RoutePart route[kMaxRouteParts];
};

// Finds the slots of a token and the flags to raise for its row, and sends its route to every rank that takes part. One
// warp, a lane per column; `named` is the expert index in the lane's column.
__device__ void find_targets(const SendTokensParams& params, const bool* present, uint32_t epoch, int token,
                             int64_t named, Targets& targets, uint32_t** owed) {
  const LowLatencyDomain& domain = params.domain;
  const int lane = threadIdx.x % 32;
  if (named < -1 || named >= params.shape.num_experts) {
    report_fault(domain.fault, FaultKind::kBadExpert, KernelName::kLowLatencyDispatch, WaitTag::kRows, domain.rank, -1,
                 params.shape.num_experts, named);
    named = -1;
  }
  const int expert = static_cast<int>(named);
  // Lane 8 i gathers the columns of part i.
  RoutePart part{{0, 0, 0}, epoch};
#pragma unroll
  for (int column = 0; column < RoutePart::kColumns; ++column) {
    const int its_expert = expert >= 0 ? expert : RoutePart::kNoExpert;
    set_column(part, column, __shfl_sync(kAllLanes, its_expert, lane + column));
  }
  if (lane % RoutePart::kColumns == 0) targets.route[lane / RoutePart::kColumns] = part;
  int rank = expert >= 0 ? ExpertMap{params.shape.num_experts, domain.num_ranks}.rank_of(expert) : -1;
  if (rank >= 0 && !present[rank]) rank = -1;
  const bool leads = __ffs(__match_any_sync(kAllLanes, rank)) - 1 == lane && rank >= 0;
  const unsigned leaders = __ballot_sync(kAllLanes, leads);
  const int64_t pair = static_cast<int64_t>(domain.rank) * params.shape.max_tokens + token;
  if (leads) {
    const int i = __popc(leaders & ((1u << lane) - 1));
    targets.slot[i] = buffer_of(domain, rank) + pair * params.message.slot_bytes;
    owed[i] = flags_of(domain, rank) + pair;
  }
  if (lane == 0) targets.count = __popc(leaders);
  __syncwarp();
  const int num_parts = params.message.num_route_parts;
  for (int r = lane; r < domain.num_ranks; r += 32) {
    if (!present[r]) continue;
    uint4* route = routes_of(domain, r) + pair * num_parts;
    for (int i = 0; i < num_parts; ++i) {
      ptx::store_relaxed_system(route + i, reinterpret_cast<const uint4*>(targets.route)[i]);
    }
  }
}

// Raises the flags of the rows that the CTA has stored: one fence for all. One warp, after a barrier of the CTA.
__device__ void raise_flags(uint32_t* const* owed, int num_owed, uint32_t epoch) {
  ptx::fence_acq_rel_system();
  for (int i = threadIdx.x % 32; i < num_owed; i += 32) ptx::store_relaxed_system(owed[i], epoch);
}

template <Rows kRows>
struct SendShared {
  uint32_t* owed[kMaxOwed];
  Targets targets;
  uint32_t scales[kMaxScaleWords<kRows>];
  uint32_t epoch;
  bool present[kMaxRanks];
};

template <Rows kRows>
__device__ __forceinline__ void send_tokens(const SendTokensParams& params, const CtaOfRole& cta,
                                            SendShared<kRows>& shared) {
  constexpr int kVectors = kVectorsIn<kRows>;
  auto& owed = shared.owed;
  auto& targets = shared.targets;
  auto& scales = shared.scales;
  auto& epoch = shared.epoch;
  auto& present = shared.present;
  const LowLatencyDomain& domain = params.domain;
  LowLatencyChannel& channel = channel_of(domain, domain.rank);
  const Waiter waiter = waiter_of_send(domain, KernelName::kLowLatencyDispatch);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int num_vectors = params.message.row_bytes / 16;
  const int num_words = params.message.num_scale_words;
  float global_scale = 0;
  if constexpr (kRows == Rows::kNvfp4) global_scale = *params.global_scale;

  uint4 next[kVectors], message;
  const auto load = [&](int token, int vector) {
    const auto* row =
        reinterpret_cast<const uint4*>(params.rows + static_cast<int64_t>(token) * params.shape.hidden * 2);
    const bool is_there = token < params.num_tokens && vector < num_vectors;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      next[i] = is_there ? ptx::load_streaming(row + vector * kVectors + i) : make_uint4(0, 0, 0, 0);
    }
  };
  // Converts the loaded vectors to `message`, and loads those kSendThreads further on. Collective over a warp.
  const auto prepare = [&](int token, int vector) {
    if constexpr (kRows == Rows::kFp8) {
      const Fp8Scale scale = make_scale(find_amax_bits(next), params.format != ScaleFormat::kFloat);
      message = quantise(next, scale.inverse);
      const int block = vector / (kChannelsPerScale / kChannelsPerLane);
      if (vector % (kChannelsPerScale / kChannelsPerLane) == 0 && vector < num_vectors) {
        if (params.format == ScaleFormat::kUe8m0) {
          auto* exponents = reinterpret_cast<uint8_t*>(scales);
          exponents[block] = static_cast<uint8_t>(__float_as_uint(scale.scale) >> 23);
          if ((block + 1) * kChannelsPerScale == params.shape.hidden) {
            for (int i = block + 1; i < num_words * kScalesPerWord; ++i) exponents[i] = 0;
          }
        } else {
          scales[block] = __float_as_uint(scale.scale);
        }
      }
    } else if constexpr (kRows == Rows::kNvfp4) {
      const bool ue8m0 = params.format == ScaleFormat::kNvfp4Ue8m0;
      const BlockScale low = make_block_scale(find_amax_bits(next[0], next[1]), global_scale, ue8m0);
      const BlockScale high = make_block_scale(find_amax_bits(next[2], next[3]), global_scale, ue8m0);
      message = make_uint4(quantise_eight(next[0], low.inverse), quantise_eight(next[1], low.inverse),
                           quantise_eight(next[2], high.inverse), quantise_eight(next[3], high.inverse));
      if (vector < num_vectors) {
        reinterpret_cast<uint16_t*>(scales)[vector] = static_cast<uint16_t>(high.byte << 8 | low.byte);
      }
    } else {
      message = next[0];
    }
    load(token, vector + kSendThreads);
  };
  int64_t named = -1;
  const auto load_expert = [&](int token) {
    const bool is_there = warp == kRouteWarp && token < params.num_tokens && lane < params.shape.num_topk;
    named = is_there ? params.topk_idx[static_cast<int64_t>(token) * params.shape.num_topk + lane] : -1;
  };
  // A CTA's first vectors are loaded and converted while the last threads wait for the ranks.
  load_expert(cta.idx);
  load(cta.idx, tid);
  if (cta.idx == 0) announce_free_buffers(domain);
  // The receive writes the columns that name an expert of this rank.
  const int num_columns = domain.num_ranks * params.shape.max_tokens * params.shape.num_topk;
  for (int i = cta.idx * kSendThreads + tid; i < num_columns; i += cta.count * kSendThreads) params.row_of[i] = -1;
  if (cta.idx + tid == 0) *params.num_too_many = 0;
  const int peer = kSendThreads - 1 - tid;
  if (peer < domain.num_ranks) {
    const uint32_t this_epoch = next_epoch(channel.send);
    if (cta.idx == 0) channel.waited_us[peer] = 0;
    present[peer] = wait_until_free(domain, waiter, this_epoch, peer);
    if (cta.idx == 0 && present[peer]) {
      const uint32_t tokens = (__float_as_uint(global_scale) & 0xffff0000u) | params.num_tokens;
      ptx::store_relaxed_system(begun_of(domain, peer, domain.rank),
                                make_uint4(tokens, params.call.words[0], params.call.words[1], this_epoch));
    }
    if (peer == 0) epoch = this_epoch;
    if (cta.idx + peer == 0) *params.number = LowLatencyNumber::of(this_epoch, domain.buffer_idx, params.counter);
  }
  prepare(cta.idx, tid);
  __syncthreads();

  int num_owed = 0;
  for (int token = cta.idx; token < params.num_tokens; token += cta.count) {
    if (warp == kRouteWarp) find_targets(params, present, epoch, token, named, targets, owed + num_owed);
    __syncthreads();
    const int count = targets.count;
    for (int first = warp * 32; first < num_vectors && count > 0; first += kSendThreads) {
      const int vector = first + lane;
      if (first >= kSendThreads) prepare(token, vector);
      if (vector < num_vectors) {
        for (int i = 0; i < count; ++i) reinterpret_cast<uint4*>(targets.slot[i])[vector] = message;
      }
    }
    if constexpr (kRows != Rows::kPlain) {
      if (num_vectors > kSendThreads) __syncthreads();  // for scales that were not there before
      for (int i = tid; i < count * num_words; i += kSendThreads) {
        auto* words = reinterpret_cast<uint32_t*>(targets.slot[i / num_words] + params.message.row_bytes);
        words[i % num_words] = scales[i % num_words];
      }
    }
    load(token + cta.count, tid);
    load_expert(token + cta.count);
    num_owed += count;
    __syncthreads();
    const bool is_last = token + cta.count >= params.num_tokens;
    if (is_last || num_owed + kMaxTopk > kMaxOwed) {
      if (warp == kRouteWarp) raise_flags(owed, num_owed, epoch);
      num_owed = 0;
    }
    if (!is_last) prepare(token + cta.count, tid);
  }
}

template <Rows kRows>
__global__ void __launch_bounds__(kSendThreads, kSendCtasPerSm)
    send_tokens_kernel(const __grid_constant__ SendTokensParams params) {
  __shared__ SendShared<kRows> shared;
  ptx::allow_next_kernel();
  const CtaOfRole cta{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  send_tokens<kRows>(params, cta, shared);
  finish_quietly(channel_of(params.domain, params.domain.rank).send, shared.epoch, cta.count);
}

constexpr void (*kSendKernels[])(SendTokensParams) = {send_tokens_kernel<Rows::kPlain>, send_tokens_kernel<Rows::kFp8>,
                                                      send_tokens_kernel<Rows::kNvfp4>};

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

__device__ unsigned long long* wait_stats_of(const ReceiveTokensParams& params, int source) {
  return reinterpret_cast<unsigned long long*>(params.wait_stats + source);
}

// Waits until rank r has begun to send. If it takes part, writes its LowLatencyBegun to *begun. One CTA notes the wait.
__device__ bool wait_for_rank(const ReceiveTokensParams& params, const Waiter& waiter, uint32_t epoch, int r,
                              bool notes_wait, uint4* begun) {
  const uint64_t started = ptx::clock_ns();
  const bool has_begun = wait_until_begun(params.domain, waiter, epoch, r, begun);
  if (params.wait_stats != nullptr && notes_wait) {
    atomicAdd(wait_stats_of(params, r), (ptx::clock_ns() - started) / 1000);
  }
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
  if (waited_us > before) atomicAdd(wait_stats_of(params, source), waited_us - before);
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

// With half the registers of a send: beside another kernel's CTAs, two of these fit on an SM.
template <bool kNvfp4>
__global__ void __launch_bounds__(kReceiveThreads, 2 * kReceiveCtasPerSm)
    receive_tokens_kernel(const __grid_constant__ ReceiveTokensParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  receive_tokens<kNvfp4, false>(params, blockIdx.y, blockIdx.x, gridDim.x, stages);
}

constexpr void (*kReceiveKernels[])(ReceiveTokensParams) = {receive_tokens_kernel<false>, receive_tokens_kernel<true>};

struct SendAndReceiveParams {
  SendTokensParams send;
  ReceiveTokensParams receive;
  int num_send_ctas, num_shares;
};

// Both halves of a call: the first CTAs send, the others receive.
template <Rows kRows>
__global__ void __launch_bounds__(kSendThreads, kSendCtasPerSm)
    dispatch_tokens_kernel(const __grid_constant__ SendAndReceiveParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  static_assert(sizeof(SendShared<kRows>) <= kCopyRingBytes);
  const int num_sends = params.num_send_ctas, idx = blockIdx.x;
  if (idx < num_sends) {
    auto& shared = *reinterpret_cast<SendShared<kRows>*>(stages);
    const CtaOfRole cta{idx, num_sends};
    send_tokens<kRows>(params.send, cta, shared);
    const LowLatencyDomain& domain = params.send.domain;
    finish_for_other_role(channel_of(domain, domain.rank).send, shared.epoch, cta.count);
  } else {
    const int receiver = idx - num_sends, num_shares = params.num_shares;
    receive_tokens<kRows == Rows::kNvfp4, true>(params.receive, receiver / num_shares, receiver % num_shares,
                                                num_shares, stages);
  }
}

constexpr void (*kDispatchKernels[])(SendAndReceiveParams) = {
    dispatch_tokens_kernel<Rows::kPlain>, dispatch_tokens_kernel<Rows::kFp8>, dispatch_tokens_kernel<Rows::kNvfp4>};

Rows rows_of(ScaleFormat format) {
  if (format == ScaleFormat::kNone) return Rows::kPlain;
  return is_nvfp4(format) ? Rows::kNvfp4 : Rows::kFp8;
}

int num_send_ctas(const SendTokensParams& params, int num_device_sms) {
  return std::clamp(params.num_tokens, 1, kSendCtasPerSm * num_device_sms);
}

int num_local_experts(const ReceiveTokensParams& params) { return params.shape.num_experts / params.domain.num_ranks; }

// Receiving CTAs of each local expert, where there is room for so many CTAs.
int num_shares(const ReceiveTokensParams& params, int room) { return std::max(1, room / num_local_experts(params)); }

}  // namespace

void prepare_low_latency_dispatch() {
  for (const auto kernel : kSendKernels) prefer_shared_memory(kernel);
  for (const auto kernel : kReceiveKernels) {
    prefer_shared_memory(kernel);
    allow_shared_memory(kernel);
  }
  for (const auto kernel : kDispatchKernels) {
    prefer_shared_memory(kernel);
    allow_shared_memory(kernel);
  }
}

void launch_send_tokens(const SendTokensParams& params, int num_device_sms, cudaStream_t stream) {
  launch_kernel(LaunchKind::kPlain, kSendKernels[static_cast<int>(rows_of(params.format))], params,
                num_send_ctas(params, num_device_sms), kSendThreads, 0, stream);
}

void launch_receive_tokens(const ReceiveTokensParams& params, int num_device_sms, bool is_early, cudaStream_t stream) {
  const dim3 num_ctas(num_shares(params, kReceiveCtasPerSm * num_device_sms), num_local_experts(params));
  launch_kernel(is_early ? LaunchKind::kEarly : LaunchKind::kPlain, kReceiveKernels[is_nvfp4(params.format)], params,
                num_ctas, kReceiveThreads, kCopyRingBytes, stream);
}

void launch_dispatch_tokens(const SendTokensParams& send, const ReceiveTokensParams& receive, int num_device_sms,
                            cudaStream_t stream) {
  const int num_sends = num_send_ctas(send, num_device_sms), most = kReceiveCtasPerSm * num_device_sms;
  // All run at once where the sends leave half of the room. Otherwise the receive waits for their room anyway.
  const int shares = num_shares(receive, 2 * num_sends <= most ? most - num_sends : most);
  launch_kernel(LaunchKind::kPlain, kDispatchKernels[static_cast<int>(rows_of(send.format))],
                SendAndReceiveParams{send, receive, num_sends, shares}, num_sends + shares * num_local_experts(receive),
                kSendThreads, kCopyRingBytes, stream);
}

}  // namespace hybrid_ep
