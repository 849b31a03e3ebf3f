// One region of symmetric memory, and the low-latency calls that go through it.
//
// Calls are collective, in the same order at all ranks and on one stream at a time, which the caller ensures; between
// the two launches of a call there may be others. Nothing here allocates memory or synchronises the device.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/low_latency.h"
#include "runtime/communicator.h"

namespace hybrid_ep {

class LowLatencyRegion {
 public:
  // `memory` are the ranks' regions as this process maps them, each of capacity.region_bytes() and zero before any rank
  // makes its first call. The communicator lives longer than the region.
  LowLatencyRegion(const Communicator& communicator, const std::vector<uintptr_t>& memory,
                   const LowLatencyCapacity& capacity);

  // The two halves of dispatch and of combine. The caller fills everything but the domain, the message and the shape of
  // the launch.
  void send_tokens(SendTokensParams& params, int buffer_idx, cudaStream_t stream) const;
  void receive_tokens(ReceiveTokensParams& params, int buffer_idx, ScaleFormat format, cudaStream_t stream) const;
  void return_rows(ReturnRowsParams& params, int buffer_idx, cudaStream_t stream) const;
  void sum_rows(SumRowsParams& params, int buffer_idx, cudaStream_t stream) const;

 private:
  LowLatencyDomain domain_of(const LowLatencyShape& shape, LowLatencyKind kind, int buffer_idx) const;

  LowLatencyDomain domain_{};
  LowLatencyCapacity capacity_;
  int num_device_sms_;
};

}  // namespace hybrid_ep
