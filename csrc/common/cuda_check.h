// Turns an error of the CUDA runtime into an exception that names the call.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace hybrid_ep {

class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw CudaError(std::string(call) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

}  // namespace hybrid_ep
