// The receive of a low-latency combine: each CTA waits for all ranks, and sums 4 KiB of a token's rows.
// Legend and data flow: combine.cu.
#pragma once

#include "device/bf16.cuh"
#include "device/logfmt.cuh"
#include "device/low_latency.cuh"
#include "device/ptx/launch.cuh"
#include "kernels/low_latency/low_latency.h"
#include "layout/expert_map.h"

namespace hybrid_ep {
namespace {

constexpr int kSumThreads = 256;  // a thread sums one 16-byte vector of a token
constexpr int kRowsInFlight = 8;  // that a thread loads before it adds

__host__ __device__ int sum_ctas_of_token(const LowLatencyShape& shape) {
  return (2 * shape.hidden + kSumThreads * 16 - 1) / (kSumThreads * 16);
}

// The columns of a token whose rows are summed here, in order.
struct Terms {
  int count;
  int column[kMaxTopk];
  float weight[kMaxTopk];
};

// Finds the columns. Called by one warp, a lane per column, which has loaded the expert and weight of its column. Of
// several columns whose rows a rank has summed, the first one counts, with weight 1.
__device__ void find_terms(const SumRowsParams& params, const bool* present, const bool* has_summed, int64_t expert,
                           float weight, Terms& terms) {
  const int lane = threadIdx.x % 32;
  if (expert >= params.shape.num_experts) expert = -1;  // dispatch reports it
  const int rank = expert >= 0 ? ExpertMap{params.shape.num_experts, params.domain.num_ranks}.rank_of(expert) : -1;
  bool counts = rank >= 0 && present[rank];
  const unsigned same_rank = __match_any_sync(kAllLanes, rank);
  if (counts && has_summed[rank] && __popc(same_rank) > 1) {
    counts = __ffs(same_rank) - 1 == lane;
    weight = 1;
  }
  const unsigned chosen = __ballot_sync(kAllLanes, counts);
  if (counts) {
    const int i = __popc(chosen & ((1u << lane) - 1));
    terms.column[i] = lane;
    terms.weight[i] = weight;
  }
  if (lane == 0) terms.count = __popc(chosen);
}

// Reports why a rank has not sent all rows, as the value of its flag says. A rank that has refused the call reports
// nothing.
__device__ __noinline__ void report_unsent(const SumRowsParams& params, int rank, uint32_t value) {
  const LowLatencyDomain& domain = params.domain;
  if (params.number->call == 0) return;
  if (value >= kRefusedBits) {
    report_fault(domain.fault, FaultKind::kRefused, KernelName::kLowLatencyCombine, WaitTag::kPartialRows, domain.rank,
                 rank, 0, value - kRefusedBits);
  } else if (value >= kNoSignalBit) {
    report_fault(domain.fault, FaultKind::kNoSignal, KernelName::kLowLatencyCombine, WaitTag::kSignals, domain.rank,
                 rank, 0, value - kNoSignalBit);
  } else if (rank != domain.rank) {  // which dispatch has reported
    report_fault(domain.fault, FaultKind::kOverflow, KernelName::kLowLatencyDispatch, WaitTag::kRows, domain.rank, rank,
                 params.shape.max_tokens * domain.num_ranks, value - kTooManyRowsBit);
  }
}

// Sums 16 bytes of a token's rows, from `rows` on.
__device__ __forceinline__ void sum_rows(const SumRowsParams& params, const uint8_t* rows, const Terms& terms,
                                         float (&sum)[8]) {
  const int row_bytes = 2 * params.shape.hidden;
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
}

// Sums eight channels of a token's rows that crossed as LogFMT. `vector` is the index of the channels in a row, `rows`
// the token's rows.
__device__ void sum_logfmt_rows(const SumRowsParams& params, uint8_t* rows, int vector, const Terms& terms,
                                float (&sum)[8]) {
  const int hidden = params.shape.hidden;
  for (int first = 0; first < terms.count; first += kRowsInFlight) {
    LogCodes codes[kRowsInFlight];
    LogHeader headers[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (first + i < terms.count) {
        const LogRow row{rows + static_cast<int64_t>(terms.column[first + i]) * 2 * hidden, hidden};
        const auto* lower = reinterpret_cast<const uint32_t*>(row.lower(vector));
        const auto* header = reinterpret_cast<const float*>(row.header(vector));
        codes[i] = {make_uint2(__ldcg(lower), __ldcg(lower + 1)), __ldcg(row.upper(vector))};
        headers[i] = {__ldcg(header), __ldcg(header + 1)};
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (first + i < terms.count) add_weighted(sum, codes[i], headers[i], terms.weight[first + i]);
    }
  }
}

// Whether a rank's rows can be used; `words` are its LowLatencySent. Reports why not: they are of another dispatch, or
// in another format than this rank's call asks for.
template <bool kLogFmt>
__device__ bool is_same_call(const SumRowsParams& params, const LowLatencyNumber& own, int rank, const uint4& words) {
  const auto report = [&](CallField field, int64_t mine, int64_t theirs) {
    if (own.call == 0) return false;  // this rank refuses the call
    report_other_call(params.domain.fault, KernelName::kLowLatencyCombine, field, params.domain.rank, rank, mine,
                      theirs);
    return false;
  };
  if (words.y != own.call || words.z != own.counter) {
    return report(CallField::kHandle, as_one(own.call, own.counter), as_one(words.y, words.z));
  }
  if ((words.x & kLogFmtBit) != (kLogFmt ? kLogFmtBit : 0)) return report(CallField::kLogFmt, kLogFmt, !kLogFmt);
  return true;
}

// Item i is a part of token i % T.
template <bool kLogFmt, bool kBesideSend>
__device__ __forceinline__ void sum_tokens(const SumRowsParams& params, const CtaOfRole& cta) {
  __shared__ bool present[kMaxRanks], has_summed[kMaxRanks];
  __shared__ Terms terms;
  const LowLatencyDomain& domain = params.domain;
  LowLatencyProgress& progress = channel_of(domain, domain.rank).receive;
  const Waiter waiter(domain.fault, KernelName::kLowLatencyCombine, domain.rank, domain.timeout_ns);
  const int tid = threadIdx.x, row_bytes = 2 * params.shape.hidden;
  const int num_items = params.num_tokens * sum_ctas_of_token(params.shape);
  uint32_t epoch = 0;  // of the threads that wait for a rank
  int64_t expert = -1;
  float weight = 0;
  const auto load_columns = [&](int item) {
    if (tid >= params.shape.num_topk || item >= num_items) return;
    const int64_t position = static_cast<int64_t>(item % params.num_tokens) * params.shape.num_topk + tid;
    expert = params.topk_idx[position];
    weight = params.topk_weights[position];
  };
  load_columns(cta.idx);
  if (tid < domain.num_ranks) {
    const LowLatencyNumber number = *params.number;
    uint4 sent = make_uint4(kLogFmt ? kLogFmtBit : 0, number.call, number.counter, 0);
    epoch = next_epoch(progress);
    // Every send waits for the weights of a late rank. That time is not counted for the other ranks.
    if (uint4 own; params.wait_stats != nullptr) wait_until_sent(domain, waiter, epoch, domain.rank, &own);
    const uint64_t started = ptx::clock_ns();
    const bool has_come = wait_until_sent(domain, waiter, epoch, tid, &sent);
    present[tid] = decide(domain, epoch, tid, has_come);
    if (present[tid] && !has_come) sent = ptx::load_acquire_system(sent_of(domain, domain.rank, tid));
    if (present[tid] && sent.x >= kTooManyRowsBit) {
      present[tid] = false;
      report_unsent(params, tid, sent.x);
    } else if (present[tid]) {
      present[tid] = is_same_call<kLogFmt>(params, number, tid, sent);
    }
    has_summed[tid] = params.num_tokens >= static_cast<int>(sent.x & kNoSums);
    if (params.wait_stats != nullptr && cta.idx == 0) add_to_wait_stats(params.wait_stats, tid, started);
  }
  if constexpr (!kBesideSend) ptx::wait_for_previous_kernel();
  __syncthreads();
  for (int item = cta.idx; item < num_items; item += cta.count) {
    if (tid < 32) find_terms(params, present, has_summed, expert, weight, terms);
    __syncthreads();
    load_columns(item + cta.count);
    const int64_t token = item % params.num_tokens;
    const int offset = (item / params.num_tokens * kSumThreads + tid) * 16;
    if (offset < row_bytes) {
      uint8_t* rows = buffer_of(domain, domain.rank) + token * params.shape.num_topk * row_bytes;
      float sum[8] = {};
      if constexpr (kLogFmt) {
        sum_logfmt_rows(params, rows, offset / 16, terms, sum);
      } else {
        sum_rows(params, rows + offset, terms, sum);
      }
      *reinterpret_cast<uint4*>(params.out + token * row_bytes + offset) = round_to_bf16(sum);
    }
    __syncthreads();
  }
  finish_quietly(progress, epoch, cta.count);
}

}  // namespace
}  // namespace hybrid_ep
