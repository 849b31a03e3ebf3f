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
                            const RowsHome& rows) const {
  params.domain = domain;
  params.shape = plan.shape;
  params.rows = rows.rows;
  params.row_of = tables_of(plan, rows.results).row_of;
  params.num_too_many = rows.results + plan.results.num_too_many;
  params.number = number_of(plan, rows.results);
  params.topk_weights = rows.topk_weights;
  params.num_tokens = rows.num_tokens;
  params.use_logfmt = rows.use_logfmt;
  params.weights = plan.weights;
}

SendTokensParams LowLatencyRegion::params_of(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                             const TokensOut& tokens, int32_t* results) const {
  require(is_nvfp4(plan.format) == (tokens.global_scale != nullptr), "global_scale", tokens.global_scale != nullptr,
          "given with NVFP4 rows only");
  SendTokensParams params{};
  fill(params, plan, domain);
  params.rows = tokens.rows;
  params.topk_idx = tokens.topk_idx;
  params.row_of = results + plan.results.row_of;
  params.num_too_many = results + plan.results.num_too_many;
  params.number = reinterpret_cast<LowLatencyNumber*>(results + plan.results.number);
  params.counter = tokens.counter;
  params.num_tokens = tokens.num_tokens;
  params.global_scale = tokens.global_scale;
  return params;
}

ReceiveTokensParams LowLatencyRegion::params_of(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                                const TokensIn& tokens, int32_t* results) const {
  ReceiveTokensParams params{};
  fill(params, plan, domain);
  params.domain.timeout_ns = receive_timeout_ns_;
  params.rows = tokens.rows;
  params.scales = tokens.scales;
  params.count = results + plan.results.counts;
  params.src_info = results + plan.results.src_info;
  params.layout_range = reinterpret_cast<int64_t*>(results + plan.results.layout_range);
  params.row_of = results + plan.results.row_of;
  params.num_too_many = results + plan.results.num_too_many;
  params.num_received = results + plan.results.num_received;
  params.wait_stats = tokens.wait_stats;
  return params;
}

void LowLatencyRegion::send_tokens(const LowLatencyPlan& plan, int buffer_idx, const TokensOut& tokens,
                                   int32_t* results, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kDispatch, buffer_idx, stream);
  launch_send_tokens(params_of(plan, domain, tokens, results), num_device_sms_, stream);
}

void LowLatencyRegion::receive_tokens(const LowLatencyPlan& plan, int buffer_idx, const TokensIn& tokens,
                                      int32_t* results, cudaStream_t stream) {
  receive_tokens(plan, buffer_idx, tokens, results, false, stream);
}

void LowLatencyRegion::receive_tokens(const LowLatencyPlan& plan, int buffer_idx, const TokensIn& tokens,
                                      int32_t* results, bool is_early, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kDispatch, buffer_idx, stream);
  launch_receive_tokens(params_of(plan, domain, tokens, results), num_device_sms_, is_early, stream);
}

void LowLatencyRegion::dispatch_tokens(const LowLatencyPlan& plan, int buffer_idx, const TokensOut& out,
                                       const TokensIn& in, int32_t* results, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  bool is_captured = false;
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kDispatch, buffer_idx, stream, &is_captured);
  const SendTokensParams send = params_of(plan, domain, out, results);
  const ReceiveTokensParams receive = params_of(plan, domain, in, results);
  if (is_captured) {  // a launch in a graph costs the host nothing, and separate kernels take less time
    launch_send_tokens(send, num_device_sms_, stream);
    launch_receive_tokens(receive, num_device_sms_, true, stream);
  } else {
    launch_dispatch_tokens(send, receive, num_device_sms_, stream);
  }
}

ReturnRowsParams LowLatencyRegion::params_of(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                             const RowsHome& rows, int min_tokens_to_sum, int64_t* wait_stats) const {
  require(min_tokens_to_sum >= kMinTokensToSum, "min_tokens_to_sum", min_tokens_to_sum, "what weights are sent for");
  ReturnRowsParams params{};
  fill(params, plan, domain, rows);
  params.num_received = tables_of(plan, rows.results).num_received;
  params.wait_stats = wait_stats;
  params.min_tokens_to_sum = min_tokens_to_sum;
  return params;
}

SumRowsParams LowLatencyRegion::params_of(const LowLatencyPlan& plan, const LowLatencyDomain& domain,
                                          const RowsToSum& rows, int64_t* wait_stats) const {
  SumRowsParams params{};
  params.domain = domain;
  params.domain.timeout_ns = receive_timeout_ns_;
  params.shape = plan.shape;
  params.number = number_of(plan, rows.results);
  params.topk_idx = rows.topk_idx;
  params.topk_weights = rows.topk_weights;
  params.out = rows.out;
  params.wait_stats = wait_stats;
  params.num_tokens = rows.num_tokens;
  params.use_logfmt = rows.use_logfmt;
  return params;
}

void LowLatencyRegion::return_rows(const LowLatencyPlan& plan, int buffer_idx, const RowsHome& rows,
                                   int min_tokens_to_sum, int64_t* wait_stats, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kCombine, buffer_idx, stream);
  launch_return_rows(params_of(plan, domain, rows, min_tokens_to_sum, wait_stats), num_device_sms_, stream);
}

void LowLatencyRegion::return_signalled_rows(const LowLatencyPlan& plan, int buffer_idx, const RowsHome& rows,
                                             const ExpertSignals& signals, int num_sms, cudaStream_t stream) {
  require(num_sms >= 1, "num_sms", num_sms, "1 or more");
  const DeviceGuard guard(device_);
  ReturnSignalledRowsParams params{};
  fill(params, plan, begin(plan, LowLatencyKind::kCombine, buffer_idx, stream), rows);
  params.count = rows.results + plan.results.counts;
  params.src_info = rows.results + plan.results.src_info;
  params.layout_range = reinterpret_cast<const int64_t*>(rows.results + plan.results.layout_range);
  params.signals = signals;
  launch_return_signalled_rows(params, std::min(num_sms, num_device_sms_), stream);
}

void LowLatencyRegion::sum_rows(const LowLatencyPlan& plan, int buffer_idx, const RowsToSum& rows, int64_t* wait_stats,
                                cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kCombine, buffer_idx, stream);
  launch_sum_rows(params_of(plan, domain, rows, wait_stats), stream);
}

void LowLatencyRegion::combine_rows(const LowLatencyPlan& plan, int buffer_idx, const RowsHome& home,
                                    int min_tokens_to_sum, const RowsToSum& to_sum, int64_t* wait_stats,
                                    cudaStream_t stream) {
  const DeviceGuard guard(device_);
  bool is_captured = false;
  const LowLatencyDomain domain = begin(plan, LowLatencyKind::kCombine, buffer_idx, stream, &is_captured);
  const ReturnRowsParams send = params_of(plan, domain, home, min_tokens_to_sum, wait_stats);
  const SumRowsParams sum = params_of(plan, domain, to_sum, wait_stats);
  const int64_t row_bytes = 2 * plan.shape.hidden;
  const uint8_t* rows_end = home.rows + plan.shape.num_experts * int64_t{plan.shape.max_tokens} * row_bytes;
  const bool overwrites_rows = to_sum.out < rows_end && home.rows < to_sum.out + to_sum.num_tokens * row_bytes;
  if (is_captured || overwrites_rows) {  // the sum writes when the send has ended
    launch_return_rows(send, num_device_sms_, stream);
    launch_sum_rows(sum, stream);
  } else {
    launch_combine_rows(send, sum, num_device_sms_, stream);
  }
}

}  // namespace hybrid_ep
