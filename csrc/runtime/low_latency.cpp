#include "runtime/low_latency.h"

#include <algorithm>

#include "common/check.h"
#include "common/cuda_check.h"
#include "common/device_guard.h"

namespace hybrid_ep {

LowLatencyResults LowLatencyResults::of(const LowLatencyShape& shape, int num_ranks) {
  const int64_t num_local = shape.num_experts / num_ranks;
  const int64_t num_sources = static_cast<int64_t>(num_ranks) * shape.max_tokens;
  LowLatencyResults results{};
  results.counts = results.layout_range + 2 * num_local * num_ranks;
  results.src_info = results.counts + num_local;
  results.row_of = results.src_info + num_local * num_sources;
  results.num_received = results.row_of + num_sources * shape.num_topk;
  results.num_too_many = results.num_received + num_ranks;
  results.number = (results.num_too_many + 1 + 1) / 2 * 2;
  results.num_ints = results.number + 2;
  return results;
}

LowLatencyPlan LowLatencyPlan::of(const LowLatencyShape& shape, ScaleFormat format, int num_ranks) {
  require(shape.max_tokens >= 0 && shape.max_tokens <= kMaxLowLatencyTokens, "tokens of a rank", shape.max_tokens,
          "0 … 65535");
  return {num_ranks,
          shape,
          format,
          LowLatencyMessage::of(shape, format),
          LowLatencyWeights::of(shape),
          LowLatencyCapacity::of(shape, num_ranks),
          LowLatencyResults::of(shape, num_ranks),
          LowLatencyCall::of(shape, format)};
}

LowLatencyPlan LowLatencyPlan::refused(int num_ranks, uint32_t number) {
  require(number >= 1 && number < kTooManyRowsBit, "number of a refusal", number, "1 … 2³⁰ − 1");
  LowLatencyPlan plan = of({num_ranks, 1, kRowAlignBytes / 2, 0}, ScaleFormat::kNone, num_ranks);
  plan.call = LowLatencyCall::refused(number);
  return plan;
}

const LowLatencyNumber* number_of(const LowLatencyPlan& plan, const int32_t* results) {
  return reinterpret_cast<const LowLatencyNumber*>(results + plan.results.number);
}

LowLatencyPlan LowLatencyPlan::compared() const {
  LowLatencyPlan plan = of({shape.num_experts, shape.num_topk, shape.hidden, 0}, format, num_ranks);
  plan.call = call;
  return plan;
}

LowLatencyRegion::LowLatencyRegion(const Communicator& communicator, const std::vector<uintptr_t>& memory,
                                   const LowLatencyCapacity& capacity, bool takes_masks)
    : capacity_(capacity), device_(communicator.device()), num_device_sms_(communicator.num_device_sms()) {
  const DeviceGuard guard(device_);
  prepare_low_latency_dispatch();
  prepare_low_latency_combine();
  const Domain& domain = communicator.domain();
  require(static_cast<int>(memory.size()) == domain.num_ranks, "addresses of the region", memory.size(),
          "one for each rank");
  domain_.rank = domain.rank;
  domain_.num_ranks = domain.num_ranks;
  domain_.takes_masks = takes_masks;
  domain_.timeout_ns = receive_timeout_ns_ = domain.timeout_ns;
  domain_.fault = domain.fault;
  for (int r = 0; r < domain.num_ranks; ++r) domain_.region[r] = reinterpret_cast<uint8_t*>(memory[r]);
}

bool LowLatencyRegion::is_capturing(cudaStream_t stream) const {
  if (stream == nullptr) return false;  // CUDA does not capture the default stream
  const DeviceGuard guard(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

LowLatencyDomain LowLatencyRegion::begin(const LowLatencyPlan& plan, LowLatencyKind kind, int buffer_idx,
                                         cudaStream_t stream, bool* is_captured) {
  require(covers(plan), "memory of a call", plan.capacity.region_bytes(), "what the region was made for, in each part");
  require(buffer_idx >= 0 && buffer_idx < kLowLatencyBuffers, "buffer_idx", buffer_idx, "0 or 1");
  const bool captures = is_capturing(stream);
  was_captured_ |= captures;
  if (is_captured != nullptr) *is_captured = captures;
  LowLatencyDomain domain = domain_;
  domain.kind = kind;
  domain.buffer_idx = buffer_idx;
  domain.routes_begin = capacity_.routes_begin(buffer_idx);
  domain.flags_begin = capacity_.flags_begin(buffer_idx);
  domain.buffer_begin = capacity_.buffer_begin(kind, buffer_idx);
  return domain;
}

void LowLatencyRegion::fill(DispatchTokensParams& params, const LowLatencyPlan& plan,
                            const LowLatencyDomain& domain) const {
  params.domain = domain;
  params.shape = plan.shape;
  params.message = plan.message;
  params.format = plan.format;
  params.call = plan.call;
}

void LowLatencyRegion::fill(SendHomeParams& params, const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                            const LowLatencyCombine& call) const {
  params.domain = domain;
  params.shape = plan.shape;
  params.rows = call.rows;
  params.row_of = tables_of(plan, call.results).row_of;
  params.num_too_many = call.results + plan.results.num_too_many;
  params.number = number_of(plan, call.results);
  params.topk_weights = call.topk_weights;
  params.num_tokens = call.num_tokens;
  params.use_logfmt = call.use_logfmt;
  params.weights = plan.weights;
}

SendTokensParams LowLatencyRegion::send_tokens_params(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                                      const LowLatencyDispatch& call) const {
  require(is_nvfp4(plan.format) == (call.global_scale != nullptr), "global_scale", call.global_scale != nullptr,
          "given with NVFP4 rows only");
  SendTokensParams params{};
  fill(params, plan, domain);
  params.rows = call.rows;
  params.topk_idx = call.topk_idx;
  params.row_of = call.results + plan.results.row_of;
  params.num_too_many = call.results + plan.results.num_too_many;
  params.number = reinterpret_cast<LowLatencyNumber*>(call.results + plan.results.number);
  params.counter = call.counter;
  params.num_tokens = call.num_tokens;
  params.global_scale = call.global_scale;
  return params;
}

ReceiveTokensParams LowLatencyRegion::receive_tokens_params(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                                            const LowLatencyDispatch& call) const {
  ReceiveTokensParams params{};
  fill(params, plan, domain);
  params.domain.timeout_ns = receive_timeout_ns_;
  params.rows = call.received_rows;
  params.scales = call.received_scales;
  params.count = call.results + plan.results.counts;
  params.src_info = call.results + plan.results.src_info;
  params.layout_range = reinterpret_cast<int64_t*>(call.results + plan.results.layout_range);
  params.row_of = call.results + plan.results.row_of;
  params.num_too_many = call.results + plan.results.num_too_many;
  params.num_received = call.results + plan.results.num_received;
  params.wait_stats = call.wait_stats;
  return params;
}

void LowLatencyRegion::receive_tokens(const LowLatencyPlan& plan, const LowLatencyDispatch& call, bool is_early,
                                      cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kDispatch, call.buffer_idx, stream);
  launch_receive_tokens(receive_tokens_params(plan, domain, call), num_device_sms_, is_early, stream);
}

void LowLatencyRegion::dispatch(const LowLatencyPlan& plan, const LowLatencyDispatch& call, Halves halves,
                                cudaStream_t stream) {
  if (halves == Halves::kReceive) {
    receive_tokens(plan, call, false, stream);
    return;
  }
  const DeviceGuard guard(device_);
  bool is_captured = false;
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kDispatch, call.buffer_idx, stream, &is_captured);
  const SendTokensParams send = send_tokens_params(plan, domain, call);
  if (halves == Halves::kBoth && !is_captured) {
    launch_dispatch_tokens(send, receive_tokens_params(plan, domain, call), num_device_sms_, stream);
    return;
  }
  launch_send_tokens(send, num_device_sms_, stream);
  // A launch in a graph costs the host nothing, and separate kernels take less time.
  if (halves == Halves::kBoth) {
    launch_receive_tokens(receive_tokens_params(plan, domain, call), num_device_sms_, true, stream);
  }
}

ReturnRowsParams LowLatencyRegion::return_rows_params(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                                      const LowLatencyCombine& call) const {
  require(call.min_tokens_to_sum >= kMinTokensToSum, "min_tokens_to_sum", call.min_tokens_to_sum,
          "what weights are sent for");
  ReturnRowsParams params{};
  fill(params, plan, domain, call);
  params.num_received = tables_of(plan, call.results).num_received;
  params.wait_stats = call.wait_stats;
  params.min_tokens_to_sum = call.min_tokens_to_sum;
  return params;
}

SumRowsParams LowLatencyRegion::sum_rows_params(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                                const LowLatencyCombine& call) const {
  SumRowsParams params{};
  params.domain = domain;
  params.domain.timeout_ns = receive_timeout_ns_;
  params.shape = plan.shape;
  params.number = number_of(plan, call.results);
  params.topk_idx = call.topk_idx;
  params.topk_weights = call.topk_weights;
  params.out = call.out;
  params.wait_stats = call.wait_stats;
  params.num_tokens = call.num_tokens;
  params.use_logfmt = call.use_logfmt;
  return params;
}

void LowLatencyRegion::return_signalled_rows(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                             const LowLatencyCombine& call, cudaStream_t stream) const {
  require(call.num_sms >= 1, "num_sms", call.num_sms, "1 or more");
  ReturnSignalledRowsParams params{};
  fill(params, plan, domain, call);
  params.count = call.results + plan.results.counts;
  params.src_info = call.results + plan.results.src_info;
  params.layout_range = reinterpret_cast<const int64_t*>(call.results + plan.results.layout_range);
  params.signals = call.signals;
  launch_return_signalled_rows(params, std::min(call.num_sms, num_device_sms_), stream);
}

void LowLatencyRegion::combine(const LowLatencyPlan& plan, const LowLatencyCombine& call, Halves halves,
                               cudaStream_t stream) {
  const DeviceGuard guard(device_);
  bool is_captured = false;
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kCombine, call.buffer_idx, stream, &is_captured);
  const bool has_signals = call.signals.raised != nullptr;
  if (halves == Halves::kBoth && !is_captured && !has_signals) {
    const int64_t row_bytes = 2 * plan.shape.hidden;
    const uint8_t* rows_end = call.rows + plan.shape.num_experts * int64_t{plan.shape.max_tokens} * row_bytes;
    // Sums over the rows are written when the send has ended.
    if (call.out >= rows_end || call.rows >= call.out + call.num_tokens * row_bytes) {
      launch_combine_rows(return_rows_params(plan, domain, call), sum_rows_params(plan, domain, call), num_device_sms_,
                          stream);
      return;
    }
  }
  if (halves != Halves::kReceive && has_signals) {
    return_signalled_rows(plan, domain, call, stream);
  } else if (halves != Halves::kReceive) {
    launch_return_rows(return_rows_params(plan, domain, call), num_device_sms_, stream);
  }
  if (halves != Halves::kSend) launch_sum_rows(sum_rows_params(plan, domain, call), stream);
}

}  // namespace hybrid_ep
