// The kernels that use a link, as functions of one module. `_cuda` launches its own, or those of `_nvshmem` where
// NVSHMEM carries the link.
#pragma once

#include "kernels/between/params.h"
#include "kernels/low_latency_between/low_latency_between.h"

namespace hybrid_ep {

struct LinkKernels {
  void (*prepare_dispatch)();
  void (*dispatch)(const DispatchBetweenParams&, int num_sms, cudaStream_t);
  void (*prepare_combine)();
  void (*combine)(const CombineBetweenParams&, int num_sms, cudaStream_t);
  void (*stream_chunks)(const StreamChunksParams&, int num_sms, cudaStream_t);
  void (*prepare_low_latency_dispatch)();
  void (*ship_tokens)(const ShipTokensParams&, int num_device_sms, cudaStream_t);
  void (*forward_tokens)(const ForwardTokensParams&, int num_device_sms, cudaStream_t);
  void (*ship_rows)(const ShipRowsParams&, int num_device_sms, cudaStream_t);
  void (*forward_rows)(const ForwardRowsParams&, int num_device_sms, cudaStream_t);
};

constexpr LinkKernels own_link_kernels() {
  return {&prepare_dispatch_between, &launch_dispatch_between, &prepare_combine_between,
          &launch_combine_between,   &launch_stream_chunks,    &prepare_low_latency_between_dispatch,
          &launch_ship_tokens,       &launch_forward_tokens,   &launch_ship_rows,
          &launch_forward_rows};
}

// The name of the capsule that passes them: modules of one version fit each other.
constexpr char kLinkKernelsName[] = "hybrid_ep.LinkKernels " HYBRID_EP_VERSION;

}  // namespace hybrid_ep
