// Opens the proxy for the commands of a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "transport/proxy.h"

namespace hybrid_ep {

// Opens a call of the proxy: now, or at every replay if the stream is captured. To be called before the launch of each
// kernel that gives commands.
void begin_proxy_call(Proxy& proxy, const LinkView& link, cudaStream_t stream);

}  // namespace hybrid_ep
