// Low-latency combine: two launches, a warp per row on the way out and some CTAs per token on the way in.
//
//     rows[e][place] ─► shared memory ─► row (token, column) in the source's buffer ─ sent ─► sum_rows
//     sum_rows: out[t] = Σ_k weight[t, k] × row (t, k)
//
// The expert's rank stores each row straight where the source's sum reads it: dispatch has left the address of every
// row in `origins`. Rows are not summed before they cross: that would need the weights, which the sources have, and so
// a wait in the middle of the send, where nothing may hold an SM for another rank. Legend: T tokens, K top-k, H hidden,
// M most tokens of a rank, R ranks, LE local experts.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/bf16.cuh"
#include "device/low_latency.cuh"
#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/launch.cuh"
#include "kernels/launch.h"
#include "kernels/low_latency.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxReturnWarps = 16;
constexpr int kSumThreads = 256;  // a thread sums one 16-byte vector of a token
constexpr int kRowsInFlight = 8;  // that a thread loads before it adds

// Each warp has one row of shared memory. The warps of the grid take the experts in turn, so that those of one expert
// are on different SMs.
__global__ void __launch_bounds__(kMaxReturnWarps * 32, 1)
    return_rows_kernel(const __grid_constant__ ReturnRowsParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ uint64_t barriers[kMaxReturnWarps];
  __shared__ bool present[kMaxRanks];
  ptx::allow_next_kernel();
  const LowLatencyDomain& domain = params.domain;
  const Waiter waiter(domain.fault, KernelName::kLowLatencyCombine, domain.rank, domain.timeout_ns);
  const int tid = threadIdx.x, warp = tid / 32;
  const bool is_leader = tid % 32 == 0;
  const int num_warps = blockDim.x / 32 * gridDim.x, num_local_experts = params.shape.num_experts / domain.num_ranks;
  const int capacity = params.shape.max_tokens * domain.num_ranks;
  const int row_bytes = 2 * params.shape.hidden, rows_per_rank = params.shape.max_tokens * params.shape.num_topk;
  uint8_t* stage = stages + static_cast<int64_t>(warp) * row_bytes;
  uint64_t* barrier = barriers + warp;
  uint32_t parity = 0;

  // A leader's first row is on its way while the CTA waits for the ranks. Items are (share of an expert, expert).
  const int first_item = warp * gridDim.x + blockIdx.x, shares = max(1, num_warps / num_local_experts);
  const auto count_rows = [&](int expert) {
    const int64_t last = params.layout_range[(expert + 1) * static_cast<int64_t>(domain.num_ranks) - 1];
    return static_cast<int>(last >> 32) + static_cast<int>(last & 0xffffffff);
  };
  const auto load_row = [&](int64_t row) {
    ptx::barrier_expect(barrier, row_bytes);
    ptx::bulk_load(stage, params.rows + row * row_bytes, row_bytes, barrier);
  };
  const bool has_item = is_leader && first_item < shares * num_local_experts;
  bool is_loaded = false;
  int count = 0;
  if (has_item) {
    ptx::barrier_init(barrier, 1);
    ptx::fence_barrier_init();
    count = count_rows(first_item % num_local_experts);
    is_loaded = first_item / num_local_experts < count;
    if (is_loaded) {
      load_row(static_cast<int64_t>(first_item % num_local_experts) * capacity + first_item / num_local_experts);
    }
  }
  const uint32_t epoch = ptx::load_relaxed_gpu(&channel_of(domain, domain.rank).send.epoch) + 1;
  announce_free_buffers(domain);
  if (tid < domain.num_ranks) present[tid] = wait_until_free(domain, waiter, epoch, tid);
  __syncthreads();

  if (has_item) {
    for (int item = first_item; item < shares * num_local_experts; item += num_warps) {
      const int expert = item % num_local_experts;
      if (item != first_item) count = count_rows(expert);
      for (int place = item / num_local_experts; place < count; place += shares) {
        const int64_t row = static_cast<int64_t>(expert) * capacity + place;
        if (!is_loaded) {
          ptx::bulk_wait_read<0>();
          load_row(row);
        }
        is_loaded = false;
        const int origin = params.origins[row];
        ptx::barrier_wait(barrier, parity);
        parity ^= 1;
        // NOTE: after a dispatch that gave a rank up, an origin may never have been written.
        const int source = origin / rows_per_rank;
        if (origin < 0 || source >= domain.num_ranks || !present[source]) continue;
        uint8_t* target = buffer_of(domain, source) + static_cast<int64_t>(origin % rows_per_rank) * row_bytes;
        ptx::bulk_store(target, stage, row_bytes);
        ptx::bulk_commit();
      }
    }
    ptx::bulk_wait_written<0>();
  }
  finish_send(domain, present, epoch, 0);
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

// One warp, a lane per column, which has loaded the expert and the weight that stand there. Of a duplicate expert the
// first column counts.
__device__ void find_terms(const SumRowsParams& params, const bool* present, int64_t expert, float weight,
                           Terms& terms) {
  const int lane = threadIdx.x % 32;
  if (expert >= params.shape.num_experts) expert = -1;  // dispatch reports it
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
  const uint32_t epoch = ptx::load_relaxed_gpu(&channel_of(domain, domain.rank).receive.epoch) + 1;
  const Waiter waiter(domain.fault, KernelName::kLowLatencyCombine, domain.rank, domain.timeout_ns);
  const int tid = threadIdx.x, token = blockIdx.x;
  int64_t expert = -1, waited_us = 0;
  float weight = 0;
  if (tid < params.shape.num_topk && token < params.num_tokens) {
    const int64_t position = static_cast<int64_t>(token) * params.shape.num_topk + tid;
    expert = params.topk_idx[position];
    weight = params.topk_weights[position];
  }
  if (tid < domain.num_ranks) {
    const uint64_t started = ptx::clock_ns();
    uint32_t unused = 0;
    present[tid] = wait_until_sent(domain, waiter, epoch, tid, WaitTag::kPartialRows, &unused);
    waited_us = static_cast<int64_t>((ptx::clock_ns() - started) / 1000);
  }
  ptx::wait_for_previous_kernel();
  __syncthreads();
  if (params.wait_stats != nullptr && token == 0 && blockIdx.y == 0 && tid < domain.num_ranks) {
    params.wait_stats[tid] += waited_us;
  }
  if (token < params.num_tokens) {
    if (tid < 32) find_terms(params, present, expert, weight, terms);
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
  finish_receive(domain, epoch);
}

}  // namespace

void prepare_low_latency() { allow_shared_memory(return_rows_kernel); }

void launch_return_rows(const ReturnRowsParams& params, int num_device_sms, cudaStream_t stream) {
  const int row_bytes = 2 * params.shape.hidden;
  const int num_warps = std::clamp(kDynamicSharedBytes / row_bytes, 1, kMaxReturnWarps);
  return_rows_kernel<<<num_device_sms, num_warps * 32, num_warps * row_bytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of return_rows_kernel");
}

void launch_sum_rows(const SumRowsParams& params, cudaStream_t stream) {
  const int num_segments = (2 * params.shape.hidden + kSumThreads * 16 - 1) / (kSumThreads * 16);
  launch_early(sum_rows_kernel, params, dim3(std::max(1, params.num_tokens), num_segments), kSumThreads, stream);
}

}  // namespace hybrid_ep
