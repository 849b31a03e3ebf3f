// How a launch opens its call of the proxy.
#pragma once

#include <cuda_runtime_api.h>

#include "transport/proxy.h"

namespace hybrid_ep {

// Opens a call of the proxy, now or, while the stream is captured, at every replay. Ahead of the launch of each kernel
// that gives commands.
void begin_proxy_call(Proxy& proxy, const LinkView& link, cudaStream_t stream);

}  // namespace hybrid_ep
