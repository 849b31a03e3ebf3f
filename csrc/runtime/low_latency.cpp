#include "runtime/low_latency.h"

#include "common/check.h"

namespace hybrid_ep {

LowLatencyRegion::LowLatencyRegion(const Communicator& communicator, const std::vector<uintptr_t>& memory,
                                   const LowLatencyCapacity& capacity)
    : capacity_(capacity), num_device_sms_(communicator.num_device_sms()) {
  prepare_low_latency();
  const Domain& domain = communicator.domain();
  require(static_cast<int>(memory.size()) == domain.num_ranks, "addresses of the region", memory.size(),
          "one for each rank");
  domain_.rank = domain.rank;
  domain_.num_ranks = domain.num_ranks;
  domain_.timeout_ns = domain.timeout_ns;
  domain_.fault = domain.fault;
  for (int r = 0; r < domain.num_ranks; ++r) domain_.region[r] = reinterpret_cast<uint8_t*>(memory[r]);
}

LowLatencyDomain LowLatencyRegion::domain_of(const LowLatencyShape& shape, LowLatencyKind kind, int buffer_idx) const {
  require(capacity_.covers(LowLatencyCapacity::of(shape, domain_.num_ranks)), "tokens of a rank", shape.max_tokens,
          "what the region was made for");
  require(buffer_idx >= 0 && buffer_idx < kLowLatencyBuffers, "buffer_idx", buffer_idx, "0 or 1");
  LowLatencyDomain domain = domain_;
  domain.kind = kind;
  domain.buffer_idx = buffer_idx;
  domain.buffer_begin = capacity_.buffer_begin(kind, buffer_idx);
  return domain;
}

void LowLatencyRegion::send_tokens(SendTokensParams& params, int buffer_idx, cudaStream_t stream) const {
  params.domain = domain_of(params.shape, LowLatencyKind::kDispatch, buffer_idx);
  params.message = LowLatencyMessage::of(params.shape, params.format, domain_.num_ranks);
  launch_send_tokens(params, num_device_sms_, stream);
}

void LowLatencyRegion::receive_tokens(ReceiveTokensParams& params, int buffer_idx, ScaleFormat format,
                                      cudaStream_t stream) const {
  params.domain = domain_of(params.shape, LowLatencyKind::kDispatch, buffer_idx);
  params.message = LowLatencyMessage::of(params.shape, format, domain_.num_ranks);
  launch_receive_tokens(params, num_device_sms_, stream);
}

void LowLatencyRegion::return_rows(ReturnRowsParams& params, int buffer_idx, cudaStream_t stream) const {
  params.domain = domain_of(params.shape, LowLatencyKind::kCombine, buffer_idx);
  params.weights = LowLatencyWeights::of(params.shape);
  launch_return_rows(params, num_device_sms_, stream);
}

void LowLatencyRegion::sum_rows(SumRowsParams& params, int buffer_idx, cudaStream_t stream) const {
  params.domain = domain_of(params.shape, LowLatencyKind::kCombine, buffer_idx);
  launch_sum_rows(params, stream);
}

}  // namespace hybrid_ep
