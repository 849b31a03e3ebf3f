// Low-latency dispatch: two launches, a CTA per token on the way out and some CTAs per local expert on the way in.
//
//     x[t] ─► (quantised) ─► slot (me, t) of each rank that has an expert of t ─┐
//     topk_idx[t] ─────────► route (me, t) of every rank ───────────────────────┴─ sent_epoch ─► receive
//     receive: routes of all tokens ─► place of each copy ─► rows[e][place] ◄─ slot (source, token)
//
// A row crosses once for each destination rank, not once for each expert, and the slot is the token's own index, so the
// send needs no counts. The receiver finds the places from the routes: every CTA walks through all of them in the
// order of source rank and token, and copies its share of its expert's rows. Legend: T tokens of this rank, M most
// tokens of a rank, K top-k, R ranks, W words of scales.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/fp8.cuh"
#include "device/lanes.cuh"
#include "device/low_latency.cuh"
#include "device/ptx/launch.cuh"
#include "kernels/launch.h"
#include "kernels/low_latency.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kCtasPerSm = 2;
constexpr int kNoExpert = 0xffff;
constexpr int kMaxScales = kMaxRowBytes / 2 / kChannelsPerScale;

// Where one token goes.
struct Targets {
  int count;
  uint8_t* slot[kMaxTopk];
  alignas(16) uint16_t route[kMaxTopk];  // experts in their columns; kNoExpert for none and for one named before
};

// Finds the ranks of a token and sends its route to every rank that takes part. One warp, a lane per column, which has
// loaded the expert that is `named` there.
__device__ void find_targets(const SendTokensParams& params, const bool* present, int token, int64_t named,
                             Targets& targets) {
  const LowLatencyDomain& domain = params.domain;
  const int lane = threadIdx.x % 32;
  if (named < -1 || named >= params.shape.num_experts) {
    report_fault(domain.fault, FaultKind::kBadExpert, KernelName::kLowLatencyDispatch, WaitTag::kRows, domain.rank, -1,
                 params.shape.num_experts, named);
    named = -1;
  }
  const auto is_first = [&](int value) { return __ffs(__match_any_sync(kAllLanes, value)) - 1 == lane && value >= 0; };
  const int expert = static_cast<int>(named);
  const bool counts = is_first(expert);
  targets.route[lane] = static_cast<uint16_t>(counts ? expert : kNoExpert);
  int rank = counts ? ExpertMap{params.shape.num_experts, domain.num_ranks}.rank_of(expert) : -1;
  if (rank >= 0 && !present[rank]) rank = -1;
  const bool leads = is_first(rank);
  const unsigned leaders = __ballot_sync(kAllLanes, leads);
  const int64_t place = static_cast<int64_t>(domain.rank) * params.shape.max_tokens + token;
  if (leads) {
    targets.slot[__popc(leaders & ((1u << lane) - 1))] =
        buffer_of(domain, rank) + params.message.slots_begin + place * params.message.slot_bytes;
  }
  if (lane == 0) targets.count = __popc(leaders);
  __syncwarp();
  for (int r = lane; r < domain.num_ranks; r += 32) {
    if (!present[r]) continue;
    auto* route = reinterpret_cast<uint4*>(buffer_of(domain, r) + place * params.message.route_bytes);
    for (int i = 0; i < params.message.route_bytes / 16; ++i) {
      route[i] = reinterpret_cast<const uint4*>(targets.route)[i];
    }
  }
}

// kQuantise: rows leave as e4m3 with scales, otherwise as they are.
template <bool kQuantise>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    send_tokens_kernel(const __grid_constant__ SendTokensParams params) {
  constexpr int kVectorsIn = kQuantise ? 2 : 1;  // 16-byte vectors that make one of the message
  __shared__ bool present[kMaxRanks];
  __shared__ Targets targets;
  __shared__ uint32_t scales[kMaxScales];
  ptx::allow_next_kernel();
  const LowLatencyDomain& domain = params.domain;
  LowLatencyChannel& channel = channel_of(domain, domain.rank);
  const Waiter waiter = waiter_of_send(domain, KernelName::kLowLatencyDispatch);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int num_vectors = params.message.row_bytes / 16;
  const int num_words = params.message.num_scale_words;

  uint4 next[kVectorsIn];
  const auto load = [&](int token, int vector) {
    const auto* row =
        reinterpret_cast<const uint4*>(params.rows + static_cast<int64_t>(token) * params.shape.hidden * 2);
    const bool is_there = token < params.num_tokens && vector < num_vectors;
#pragma unroll
    for (int i = 0; i < kVectorsIn; ++i) {
      next[i] = is_there ? ptx::load_streaming(row + vector * kVectorsIn + i) : make_uint4(0, 0, 0, 0);
    }
  };
  int64_t named = -1;
  const auto load_expert = [&](int token) {
    const bool is_there = warp == 0 && token < params.num_tokens && lane < params.shape.num_topk;
    named = is_there ? params.topk_idx[static_cast<int64_t>(token) * params.shape.num_topk + lane] : -1;
  };
  // What a CTA needs first is on its way while it waits for the ranks.
  load(blockIdx.x, tid);
  load_expert(blockIdx.x);
  // The receive writes the columns that name an expert of this rank.
  const int num_columns = domain.num_ranks * params.shape.max_tokens * params.shape.num_topk;
  for (int i = blockIdx.x * kThreads + tid; i < num_columns; i += gridDim.x * kThreads) params.row_of[i] = -1;
  const uint32_t epoch = ptx::load_relaxed_gpu(&channel.send.epoch) + 1;
  announce_free_buffers(domain);
  if (tid < domain.num_ranks) present[tid] = wait_until_free(domain, waiter, epoch, tid);
  __syncthreads();

  for (int token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
    if (warp == 0) find_targets(params, present, token, named, targets);
    __syncthreads();
    const int count = targets.count;
    for (int first = warp * 32; first < num_vectors && count > 0; first += kThreads) {
      const int vector = first + lane;
      uint4 message;
      if constexpr (kQuantise) {
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
      } else {
        message = next[0];
      }
      load(token, vector + kThreads);
      if (vector < num_vectors) {
        for (int i = 0; i < count; ++i) reinterpret_cast<uint4*>(targets.slot[i])[vector] = message;
      }
    }
    if constexpr (kQuantise) {
      __syncthreads();
      for (int i = tid; i < count * num_words; i += kThreads) {
        auto* words = reinterpret_cast<uint32_t*>(targets.slot[i / num_words] + params.message.row_bytes);
        words[i % num_words] = scales[i % num_words];
      }
    }
    load(token + gridDim.x, tid);
    load_expert(token + gridDim.x);
    __syncthreads();
  }
  finish_send(domain, present, epoch, params.digest << 16 | params.num_tokens);
}

// A copy that a CTA has found: which row of its expert, and where the row lies now.
struct Found {
  const uint8_t* slot;
  int place;
};

// The column in which a route names the expert, or −1. A route names an expert at most once.
__device__ int find_column(const uint8_t* route, int route_bytes, int expert) {
  int column = -1;
  for (int i = 0; i < route_bytes / 16; ++i) {
    const uint4 vector = ptx::load_streaming(route + 16 * i);
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (static_cast<int>(words[j] & 0xffffu) == expert) column = 8 * i + 2 * j;
      if (static_cast<int>(words[j] >> 16) == expert) column = 8 * i + 2 * j + 1;
    }
  }
  return column;
}

// Copies rows and scales to their places; a warp takes a segment of a row at a time.
__device__ void copy_rows(const ReceiveTokensParams& params, int local_expert, const Found* found, int num_found) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_bytes = params.message.row_bytes;
  const int64_t capacity = static_cast<int64_t>(params.shape.max_tokens) * params.domain.num_ranks;
  const int num_segments = (row_bytes + kSegmentBytes - 1) / kSegmentBytes;
  for (int item = warp; item < num_found * num_segments; item += kWarps) {
    const Found& row = found[item / num_segments];
    const int begin = item % num_segments * kSegmentBytes + lane * 16;
    uint8_t* target = params.rows + (local_expert * capacity + row.place) * row_bytes;
    uint4 vectors[kVectorsPerLane];
#pragma unroll
    for (int v = 0; v < kVectorsPerLane; ++v) {
      const int offset = begin + v * 32 * 16;
      if (offset < row_bytes) vectors[v] = ptx::load_streaming(row.slot + offset);
    }
#pragma unroll
    for (int v = 0; v < kVectorsPerLane; ++v) {
      const int offset = begin + v * 32 * 16;
      if (offset < row_bytes) *reinterpret_cast<uint4*>(target + offset) = vectors[v];
    }
  }
  const int num_words = params.message.num_scale_words;
  for (int item = threadIdx.x; item < num_found * num_words; item += kThreads) {
    const Found& row = found[item % num_found];
    const int word = item / num_found;
    params.scales[(static_cast<int64_t>(local_expert) * num_words + word) * capacity + row.place] =
        __ldcg(reinterpret_cast<const uint32_t*>(row.slot + row_bytes) + word);
  }
}

__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    receive_tokens_kernel(const __grid_constant__ ReceiveTokensParams params) {
  __shared__ uint32_t num_tokens[kMaxRanks];  // 0 of a rank that does not take part
  __shared__ int begin[kMaxRanks + 1];        // first row of each source
  __shared__ int warp_counts[kWarps];
  __shared__ Found found[kThreads];
  const LowLatencyDomain& domain = params.domain;
  const int num_ranks = domain.num_ranks, max_tokens = params.shape.max_tokens;
  LowLatencyChannel& channel = channel_of(domain, domain.rank);
  const uint32_t epoch = ptx::load_relaxed_gpu(&channel.receive.epoch) + 1;
  const Waiter waiter(domain.fault, KernelName::kLowLatencyDispatch, domain.rank, domain.timeout_ns);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  int64_t waited_us = 0;
  if (tid < num_ranks) {
    const uint64_t started = ptx::clock_ns();
    uint32_t value = params.digest << 16;  // of a rank that is left out: no tokens
    wait_until_sent(domain, waiter, epoch, tid, WaitTag::kRows, &value);
    num_tokens[tid] = min(value & 0xffffu, static_cast<uint32_t>(max_tokens));
    if (const uint32_t digest = value >> 16; digest != params.digest) {
      num_tokens[tid] = 0;
      if (blockIdx.x == 0) {
        report_fault(domain.fault, FaultKind::kOtherCall, KernelName::kLowLatencyDispatch, WaitTag::kShape, domain.rank,
                     tid, params.digest, digest);
      }
    }
    waited_us = static_cast<int64_t>((ptx::clock_ns() - started) / 1000);
  }
  ptx::wait_for_previous_kernel();
  __syncthreads();
  if (blockIdx.x == 0 && tid < num_ranks) {
    params.num_received[tid] = num_tokens[tid];
    if (params.wait_stats != nullptr) params.wait_stats[tid] += waited_us;
  }

  const int local_expert = blockIdx.x / params.ctas_per_expert, share = blockIdx.x % params.ctas_per_expert;
  const int expert = domain.rank * (params.shape.num_experts / num_ranks) + local_expert;
  const int num_pairs = num_ranks * max_tokens;
  const int64_t first_row = static_cast<int64_t>(local_expert) * num_pairs;
  const uint8_t* routes = buffer_of(domain, domain.rank);
  const uint8_t* slots = routes + params.message.slots_begin;
  int total = 0;
  for (int first_pair = 0; first_pair < num_pairs; first_pair += kThreads) {
    const int pair = first_pair + tid, source = pair / max_tokens, token = pair % max_tokens;
    int column = -1;
    if (pair < num_pairs && token < static_cast<int>(num_tokens[source])) {
      column = find_column(routes + static_cast<int64_t>(pair) * params.message.route_bytes, params.message.route_bytes,
                           expert);
    }
    const unsigned here = __ballot_sync(kAllLanes, column >= 0);
    if (lane == 0) warp_counts[warp] = __popc(here);
    __syncthreads();
    int before = __popc(here & ((1u << lane) - 1)), num_found = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_counts[w];
      num_found += warp_counts[w];
    }
    if (pair < num_pairs && token == 0) begin[source] = total + before;
    // The CTAs of an expert take its rows in turn; this one those whose place leaves `share` when divided.
    const int skipped = (share + params.ctas_per_expert - total % params.ctas_per_expert) % params.ctas_per_expert;
    if (column >= 0 && before % params.ctas_per_expert == skipped) {
      const int place = total + before;
      found[before / params.ctas_per_expert] = {slots + static_cast<int64_t>(pair) * params.message.slot_bytes, place};
      params.src_info[first_row + place] = token;
      params.row_of[pair * params.shape.num_topk + column] = static_cast<int>(first_row) + place;
    }
    __syncthreads();
    copy_rows(params, local_expert, found, (num_found - skipped + params.ctas_per_expert - 1) / params.ctas_per_expert);
    total += num_found;
    __syncthreads();
  }
  if (share == 0) {
    if (tid == 0) {
      begin[num_ranks] = total;
      params.count[local_expert] = total;
    }
    __syncthreads();
    if (tid < num_ranks) {
      params.layout_range[static_cast<int64_t>(local_expert) * num_ranks + tid] =
          static_cast<int64_t>(begin[tid]) << 32 | (begin[tid + 1] - begin[tid]);
    }
  }
  finish_receive(domain, epoch);
}

}  // namespace

void launch_send_tokens(const SendTokensParams& params, int num_device_sms, cudaStream_t stream) {
  const int num_ctas = std::clamp(params.num_tokens, 1, kCtasPerSm * num_device_sms);
  const auto kernel = params.format == ScaleFormat::kNone ? send_tokens_kernel<false> : send_tokens_kernel<true>;
  kernel<<<num_ctas, kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of send_tokens_kernel");
}

void launch_receive_tokens(ReceiveTokensParams& params, int num_device_sms, cudaStream_t stream) {
  const int num_local_experts = params.shape.num_experts / params.domain.num_ranks;
  params.ctas_per_expert = std::max(1, kCtasPerSm * num_device_sms / num_local_experts);
  launch_early(receive_tokens_kernel, params, num_local_experts * params.ctas_per_expert, kThreads, stream);
}

}  // namespace hybrid_ep
