#include "runtime/proxy_call.h"

#include "common/cuda_check.h"

namespace hybrid_ep {

bool begin_proxy_call(Proxy& proxy, const LinkView& link, cudaStream_t stream) {
  if (link.is_mapped) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone) {
    proxy.begin_call();
    return true;
  }
  check_cuda(cudaLaunchHostFunc(stream, &Proxy::begin_call_of, &proxy), "cudaLaunchHostFunc");
  return false;
}

}  // namespace hybrid_ep
