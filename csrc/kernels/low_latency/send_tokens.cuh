// The send of a low-latency dispatch: a CTA takes a token, stores its row once to each rank that has one of its
// experts, and its route to every rank. Legend and data flow: dispatch.cu.
#pragma once

#include "device/fp8.cuh"
#include "device/lanes.cuh"
#include "device/low_latency.cuh"
#include "device/nvfp4.cuh"
#include "device/route_part.cuh"
#include "kernels/low_latency/low_latency.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kSendThreads = 512;
constexpr int kSendCtasPerSm = 2;
constexpr int kRouteWarp = kSendThreads / 32 - 1;  // the one with the fewest vectors
constexpr int kMaxOwed = 256;                      // flags that a CTA raises together, after its rows are stored
constexpr int kMaxRouteParts = (kMaxTopk + RoutePart::kColumns - 1) / RoutePart::kColumns;

// How rows leave: as they are, as e4m3 or as e2m1, with scales.
enum class Rows { kPlain, kFp8, kNvfp4 };
template <Rows kRows>
constexpr int kVectorsIn = kRows == Rows::kPlain ? 1
                           : kRows == Rows::kFp8 ? 2
                                                 : 4;  // 16 bytes, for 16 of the message
template <Rows kRows>
constexpr int kMaxScaleWords =
    kMaxRowBytes / 2 / (kRows == Rows::kNvfp4 ? kChannelsPerBlock * kScalesPerWord : kChannelsPerScale);

// The destinations of one token.
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

}  // namespace
}  // namespace hybrid_ep
