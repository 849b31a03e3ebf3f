// Low-latency combine: two launches, some CTAs per local expert on the way out and some per token on the way in.
//
//     rows[e][place] ─► row (token, column) in the source's buffer ─ sent_epoch ─► out[t] = Σ_k weight[t, k] × row (t,
//     k)
//
// The expert's rank stores each row straight where the source's sum reads it: dispatch has left the address of every
// row in `origins`. Rows are not summed before they cross, because the result must not depend on which experts share a
// rank. Legend: T tokens, K top-k, H hidden, M most tokens of a rank, R ranks.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/bf16.cuh"
#include "device/low_latency.cuh"
#include "device/ptx/launch.cuh"
#include "kernels/launch.h"
#include "kernels/low_latency.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kReturnThreads = 512;
constexpr int kReturnWarps = kReturnThreads / 32;
constexpr int kReturnCtasPerSm = 2;
constexpr int kVectorsPerLane = 4;  // 16-byte vectors of a row that a lane copies at once
constexpr int kSegmentBytes = kVectorsPerLane * 32 * 16;
constexpr int kSumThreads = 256;  // a thread sums one 16-byte vector of a token
constexpr int kRowsInFlight = 8;  // that a thread loads before it adds

__global__ void __launch_bounds__(kReturnThreads, kReturnCtasPerSm)
    return_rows_kernel(const __grid_constant__ ReturnRowsParams params) {
  __shared__ bool present[kMaxRanks];
  ptx::allow_next_kernel();
  const LowLatencyDomain& domain = params.domain;
  LowLatencyChannel& channel = channel_of(domain, domain.rank);
  const uint32_t epoch = ptx::load_acquire_gpu(&channel.send.epoch) + 1;
  const Waiter waiter(domain.fault, KernelName::kLowLatencyCombine, domain.rank, domain.timeout_ns);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  if (tid < domain.num_ranks) {
    present[tid] = wait_for_rank(domain, waiter, channel.free_epoch, epoch - 1, tid, WaitTag::kRoom);
  }
  __syncthreads();

  const int local_expert = blockIdx.x / params.ctas_per_expert, share = blockIdx.x % params.ctas_per_expert;
  const int64_t capacity = static_cast<int64_t>(params.shape.max_tokens) * domain.num_ranks;
  const int64_t last_range = params.layout_range[(local_expert + 1) * static_cast<int64_t>(domain.num_ranks) - 1];
  const int count = static_cast<int>(last_range >> 32) + static_cast<int>(last_range & 0xffffffff);
  const int row_bytes = 2 * params.shape.hidden, rows_per_rank = params.shape.max_tokens * params.shape.num_topk;
  const int num_segments = (row_bytes + kSegmentBytes - 1) / kSegmentBytes;
  const int num_rows = (count - share + params.ctas_per_expert - 1) / params.ctas_per_expert;
  for (int item = warp; item < num_rows * num_segments; item += kReturnWarps) {
    const int64_t row =
        local_expert * capacity + share + static_cast<int64_t>(item / num_segments) * params.ctas_per_expert;
    const int begin = item % num_segments * kSegmentBytes + lane * 16;
    const int origin = params.origins[row];
    uint4 vectors[kVectorsPerLane];
#pragma unroll
    for (int v = 0; v < kVectorsPerLane; ++v) {
      const int offset = begin + v * 32 * 16;
      if (offset < row_bytes) vectors[v] = ptx::load_streaming(params.rows + row * row_bytes + offset);
    }
    // NOTE: after a dispatch that gave a rank up, an origin may never have been written.
    const int source = origin / rows_per_rank;
    if (origin < 0 || source >= domain.num_ranks || !present[source]) continue;
    uint8_t* target = buffer_of(domain, source) + static_cast<int64_t>(origin % rows_per_rank) * row_bytes;
#pragma unroll
    for (int v = 0; v < kVectorsPerLane; ++v) {
      const int offset = begin + v * 32 * 16;
      if (offset < row_bytes) *reinterpret_cast<uint4*>(target + offset) = vectors[v];
    }
  }

  if (!is_last_cta(channel.send)) return;
  if (tid < domain.num_ranks && present[tid]) {
    ptx::store_release_system(&channel_of(domain, tid).sent_epoch[domain.rank], epoch);
  }
  end_call(channel.send, epoch);
}

// Adds a weighted row to eight sums. Product and sum round separately, as every engine does.
__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4& row, float weight) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(bf16_low(words[i]), weight));
    sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(bf16_high(words[i]), weight));
  }
}

// The columns of a token whose rows have come, in order.
struct Terms {
  int count;
  int column[kMaxTopk];
  float weight[kMaxTopk];
};

// One warp, a lane per column. Of a duplicate expert the first column counts.
__device__ void find_terms(const SumRowsParams& params, const bool* present, int token, Terms& terms) {
  const int lane = threadIdx.x % 32, num_topk = params.shape.num_topk;
  const int64_t position = static_cast<int64_t>(token) * num_topk + lane;
  int64_t expert = lane < num_topk ? params.topk_idx[position] : -1;
  if (expert >= params.shape.num_experts) expert = -1;  // dispatch reports it
  const float weight = lane < num_topk ? params.topk_weights[position] : 0.0f;
  bool counts = __ffs(__match_any_sync(kAllLanes, static_cast<int>(expert))) - 1 == lane && expert >= 0;
  counts = counts && present[ExpertMap{params.shape.num_experts, params.domain.num_ranks}.rank_of(counts ? expert : 0)];
  const unsigned chosen = __ballot_sync(kAllLanes, counts);
  if (counts) {
    const int i = __popc(chosen & ((1u << lane) - 1));
    terms.column[i] = lane;
    terms.weight[i] = weight;
  }
  if (lane == 0) terms.count = __popc(chosen);
}

__global__ void __launch_bounds__(kSumThreads) sum_rows_kernel(const __grid_constant__ SumRowsParams params) {
  __shared__ bool present[kMaxRanks];
  __shared__ Terms terms;
  const LowLatencyDomain& domain = params.domain;
  LowLatencyChannel& channel = channel_of(domain, domain.rank);
  const uint32_t epoch = ptx::load_acquire_gpu(&channel.receive.epoch) + 1;
  const Waiter waiter(domain.fault, KernelName::kLowLatencyCombine, domain.rank, domain.timeout_ns);
  const int tid = threadIdx.x, token = blockIdx.x;
  int64_t waited_us = 0;
  if (tid < domain.num_ranks) {
    const uint64_t started = ptx::clock_ns();
    present[tid] = wait_for_rank(domain, waiter, channel.sent_epoch, epoch, tid, WaitTag::kPartialRows);
    waited_us = static_cast<int64_t>((ptx::clock_ns() - started) / 1000);
  }
  ptx::wait_for_previous_kernel();
  __syncthreads();
  if (params.wait_stats != nullptr && token == 0 && blockIdx.y == 0 && tid < domain.num_ranks) {
    params.wait_stats[tid] += waited_us;
  }
  if (token < params.num_tokens) {
    if (tid < 32) find_terms(params, present, token, terms);
    __syncthreads();
    const int row_bytes = 2 * params.shape.hidden, offset = (blockIdx.y * kSumThreads + tid) * 16;
    if (offset < row_bytes) {
      const uint8_t* rows =
          buffer_of(domain, domain.rank) + static_cast<int64_t>(token) * params.shape.num_topk * row_bytes + offset;
      float sum[8] = {};
      for (int first = 0; first < terms.count; first += kRowsInFlight) {
        uint4 row[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i) {
          if (first + i < terms.count) {
            row[i] = ptx::load_streaming(rows + static_cast<int64_t>(terms.column[first + i]) * row_bytes);
          }
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i) {
          if (first + i < terms.count) add_weighted(sum, row[i], terms.weight[first + i]);
        }
      }
      *reinterpret_cast<uint4*>(params.out + static_cast<int64_t>(token) * row_bytes + offset) = round_to_bf16(sum);
    }
  }

  if (!is_last_cta(channel.receive)) return;
  give_back_buffer(domain, present, epoch);
  end_call(channel.receive, epoch);
}

}  // namespace

void launch_return_rows(ReturnRowsParams& params, int num_device_sms, cudaStream_t stream) {
  const int num_local_experts = params.shape.num_experts / params.domain.num_ranks;
  params.ctas_per_expert = std::max(1, kReturnCtasPerSm * num_device_sms / num_local_experts);
  return_rows_kernel<<<num_local_experts * params.ctas_per_expert, kReturnThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of return_rows_kernel");
}

void launch_sum_rows(const SumRowsParams& params, cudaStream_t stream) {
  const int num_segments = (2 * params.shape.hidden + kSumThreads * 16 - 1) / (kSumThreads * 16);
  launch_early(sum_rows_kernel, params, dim3(std::max(1, params.num_tokens), num_segments), kSumThreads, stream);
}

}  // namespace hybrid_ep
