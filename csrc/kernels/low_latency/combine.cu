// Low-latency combine: a warp per segment of a row on the way out and some CTAs per token on the way in. Both
// are CTAs of one kernel, in which those that send come first. With a hook they are two kernels.
//
//     rows[row_of[s, t, k]] ─► (several of one token: weighted sum) ─► row (t, k) in s's buffer ─ sent ─► sum_rows
//     topk_weights ─► every rank ─────────────────────┘
//     sum_rows: out[t] = Σ_k weight[t, k] × row (t, k), weight 1 where the row is a sum already
//
// The expert's rank stores each row where the source's sum reads it. Dispatch has recorded the packed row of each
// source, token and column.
//
// Partial sums: if a token has several experts on one rank, that rank sums their rows before they cross, into the first
// column. It needs the source's weights for this, so every rank sends its weights first. Other rows leave at once. Rows
// are not summed in two cases. The source has few tokens: waiting for weights would take longer than the saved bytes.
// The receive is a separate launch: such a send may not wait for another rank. Each rank decides alone, and publishes
// in its flag how many tokens a source must have for its rows to be sums.
//
// Signalled rows: the experts' kernel still runs, and signals each block of rows that it has written. A sending kernel
// of its own, on few SMs, takes the packed rows in order and waits for the signal of each block. Rows are not summed.
// If a signal does not come, this rank says so in its flag at every rank, and each rank reports it.
//
// kLogFmt: rows, and sums of rows, cross as LogFMT-10, which takes two thirds of the bytes.
// Legend: T tokens, K top-k, H hidden, M most tokens of a rank, R ranks, LE local experts.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/ptx/launch.cuh"
#include "kernels/launch.h"
#include "kernels/low_latency/low_latency.h"
#include "kernels/low_latency/return_rows.cuh"
#include "kernels/low_latency/signalled_rows.cuh"
#include "kernels/low_latency/sum_tokens.cuh"

namespace hybrid_ep {
namespace {

constexpr int kCombineCtasPerSm = 2;  // of the kernel that sends and receives
constexpr int kCombineWarps = kReturnWarps / kCombineCtasPerSm;
constexpr int kCombineRingBytes = kReturnRingBytes / kCombineCtasPerSm;
static_assert(kSumThreads == kCombineWarps * 32);  // CTAs of one kernel
static_assert(kAnnouncingThreads<kCombineWarps> > 0);

template <bool kLogFmt>
__global__ void __launch_bounds__(kReturnWarps * 32, 1)
    return_rows_kernel(const __grid_constant__ ReturnRowsParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  ptx::allow_next_kernel();
  return_rows<kLogFmt, kReturnWarps>(params, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}, stages);
}

template <bool kLogFmt>
__global__ void __launch_bounds__(kReturnWarps * 32, 1)
    return_signalled_rows_kernel(const __grid_constant__ ReturnSignalledRowsParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  return_signalled_rows<kLogFmt>(params, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}, stages);
}

template <bool kLogFmt>
__global__ void __launch_bounds__(kSumThreads, kLogFmt ? 3 : 4)
    sum_rows_kernel(const __grid_constant__ SumRowsParams params) {
  sum_tokens<kLogFmt, false>(params, {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)});
}

struct ReturnAndSumParams {
  ReturnRowsParams send;
  SumRowsParams sum;
  int num_send_ctas;
};

// Both halves of a call: the first CTAs send, the others sum what arrives. Only the others wait for whole ranks.
template <bool kLogFmt>
__global__ void __launch_bounds__(kSumThreads, kCombineCtasPerSm)
    combine_rows_kernel(const __grid_constant__ ReturnAndSumParams params) {
  extern __shared__ __align__(128) uint8_t stages[];
  const int num_sends = params.num_send_ctas, idx = blockIdx.x;
  if (idx < num_sends) {
    return_rows<kLogFmt, kCombineWarps>(params.send, {idx, num_sends}, stages);
  } else {
    sum_tokens<kLogFmt, true>(params.sum, {idx - num_sends, static_cast<int>(gridDim.x) - num_sends});
  }
}

// Indexed by whether rows cross as LogFMT.
constexpr void (*kReturnKernels[])(ReturnRowsParams) = {return_rows_kernel<false>, return_rows_kernel<true>};
constexpr void (*kReturnSignalledKernels[])(ReturnSignalledRowsParams) = {return_signalled_rows_kernel<false>,
                                                                          return_signalled_rows_kernel<true>};
constexpr void (*kSumKernels[])(SumRowsParams) = {sum_rows_kernel<false>, sum_rows_kernel<true>};
constexpr void (*kCombineKernels[])(ReturnAndSumParams) = {combine_rows_kernel<false>, combine_rows_kernel<true>};

// At least one: a refused call has no tokens, and a CTA publishes the refusal.
int num_units(const ReturnRowsParams& params) {
  return std::max(1, params.shape.max_tokens * params.domain.num_ranks * segments_of(params.shape));
}

int num_sum_ctas(const SumRowsParams& params) {
  return std::max(1, params.num_tokens) * sum_ctas_of_token(params.shape);
}

}  // namespace

void prepare_low_latency_combine() {
  for (const auto kernel : kReturnKernels) allow_shared_memory(kernel);
  for (const auto kernel : kReturnSignalledKernels) allow_shared_memory(kernel);
  for (const auto kernel : kCombineKernels) allow_shared_memory(kernel);
}

void launch_return_rows(const ReturnRowsParams& params, int num_device_sms, cudaStream_t stream) {
  launch_kernel(LaunchKind::kPlain, kReturnKernels[params.use_logfmt], params,
                std::min(num_device_sms, num_units(params)), kReturnWarps * 32, kReturnRingBytes, stream);
}

void launch_return_signalled_rows(const ReturnSignalledRowsParams& params, int num_sms, cudaStream_t stream) {
  launch_kernel(LaunchKind::kPlain, kReturnSignalledKernels[params.use_logfmt], params, num_sms, kReturnWarps * 32,
                kReturnRingBytes, stream);
}

void launch_sum_rows(const SumRowsParams& params, cudaStream_t stream) {
  launch_kernel(LaunchKind::kEarly, kSumKernels[params.use_logfmt], params, num_sum_ctas(params), kSumThreads, 0,
                stream);
}

void launch_combine_rows(const ReturnRowsParams& send, const SumRowsParams& sum, int num_device_sms,
                         cudaStream_t stream) {
  const int most = kCombineCtasPerSm * num_device_sms, num_sends = std::min(most, num_units(send));
  launch_kernel(LaunchKind::kPlain, kCombineKernels[send.use_logfmt], ReturnAndSumParams{send, sum, num_sends},
                num_sends + std::min(most, num_sum_ctas(sum)), kSumThreads, kCombineRingBytes, stream);
}

}  // namespace hybrid_ep
