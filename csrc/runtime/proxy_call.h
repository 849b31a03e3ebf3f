// Opens the proxy for the commands of a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "transport/proxy.h"

namespace hybrid_ep {

// Opens a call of the proxy: now, or at every replay if the stream is captured. Returns whether one is open now.
bool begin_proxy_call(Proxy& proxy, const LinkView& link, cudaStream_t stream);

// Opens a call and runs `launch`, which launches the kernel that gives the call's commands and ends it. If `launch`
// throws there is no such kernel, and the call is taken back.
template <typename Launch>
void launch_in_proxy_call(Proxy& proxy, const LinkView& link, cudaStream_t stream, Launch&& launch) {
  const bool is_open = begin_proxy_call(proxy, link, stream);
  try {
    launch();
  } catch (...) {
    if (is_open) proxy.take_back_call();
    throw;
  }
}

}  // namespace hybrid_ep
