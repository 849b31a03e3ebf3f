// Low-latency dispatch: a CTA per token on the way out and some CTAs per local expert on the way in. Both are
// CTAs of one kernel, in which those that send come first. With a hook they are two kernels.
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

#include "device/ptx/launch.cuh"
#include "kernels/launch.h"
#include "kernels/low_latency/low_latency.h"
#include "kernels/low_latency/receive_tokens.cuh"
#include "kernels/low_latency/send_tokens.cuh"

namespace hybrid_ep {
namespace {

static_assert(kReceiveThreads == kSendThreads && kReceiveCtasPerSm == kSendCtasPerSm);  // CTAs of one kernel

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

// Has half the registers of a send, so that two CTAs fit on an SM beside those of another kernel.
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
  // If the sending CTAs leave half of the GPU, all CTAs run at once. Otherwise receiving ones start where these end.
  const int shares = num_shares(receive, 2 * num_sends <= most ? most - num_sends : most);
  launch_kernel(LaunchKind::kPlain, kDispatchKernels[static_cast<int>(rows_of(send.format))],
                SendAndReceiveParams{send, receive, num_sends, shares}, num_sends + shares * num_local_experts(receive),
                kSendThreads, kCopyRingBytes, stream);
}

}  // namespace hybrid_ep
