// Functions of the CUDA driver, found through the runtime: the driver's library is not linked.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "common/cuda_check.h"

namespace hybrid_ep {

template <typename Function>
Function find_driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
#else
  check_cuda(cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found), "cudaGetDriverEntryPoint");
#endif
  if (found != cudaDriverEntryPointSuccess) throw CudaError(std::string("the driver has no ") + name);
  return reinterpret_cast<Function>(entry);
}

}  // namespace hybrid_ep
