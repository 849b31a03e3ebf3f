// CUDA graphs while they are captured: what the stream may be asked, and what other threads may call meanwhile.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>

#include "common/cuda_check.h"

namespace hybrid_ep {

struct Capture {
  unsigned long long id = 0;  // of the capture; 0: the stream is not captured
  cudaGraph_t graph = nullptr;
};

inline Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Capture capture;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, &capture.id, &capture.graph);
#endif
  check_cuda(error, "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusNone ? Capture{} : capture;
}

// Set once nothing can replay the graph any more: it and all that was instantiated from it are destroyed.
using GraphEnd = std::shared_ptr<const std::atomic<bool>>;

// Returns the end of a graph that is being captured.
inline GraphEnd end_of(cudaGraph_t graph) {
  auto ended = std::make_shared<std::atomic<bool>>(false);
  auto* kept = new std::shared_ptr<std::atomic<bool>>(ended);
  const auto destroy = [](void* memory) {  // on a thread of the driver, where no CUDA call is allowed
    auto* flag = static_cast<std::shared_ptr<std::atomic<bool>>*>(memory);
    (*flag)->store(true);
    delete flag;
  };
  cudaUserObject_t object{};
  const cudaError_t created = cudaUserObjectCreate(&object, kept, destroy, 1, cudaUserObjectNoDestructorSync);
  if (created != cudaSuccess) delete kept;
  check_cuda(created, "cudaUserObjectCreate");
  check_cuda(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove), "cudaGraphRetainUserObject");
  return ended;
}

// While it lives, the thread may make calls that a capture forbids to every thread of the process, though they do not
// touch its stream: queries, and frees by destructors of what Python collects in the middle of somebody's capture.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCaptureMode() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Whether a query's status means that the work is done.
inline bool is_done(cudaError_t status, const char* query) {
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check_cuda(status, query);
  return true;
}

}  // namespace hybrid_ep
