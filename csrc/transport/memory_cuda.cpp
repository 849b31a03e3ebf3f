#include <cuda_runtime_api.h>

#include <cstring>

#include "common/cuda_check.h"
#include "transport/memory.h"

namespace hybrid_ep {

void FreeMemory::operator()(uint8_t* memory) const {
  if (is_device) {
    cudaFree(memory);
  } else {
    cudaFreeHost(memory);
  }
}

Memory allocate_pinned(size_t num_bytes) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(memory, 0, num_bytes);
  return Memory(static_cast<uint8_t*>(memory), {false});
}

Memory allocate_device(size_t num_bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, num_bytes), "cudaMalloc");
  Memory owner(static_cast<uint8_t*>(memory), {true});
  check_cuda(cudaMemset(memory, 0, num_bytes), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return owner;
}

void use_device(int device) { check_cuda(cudaSetDevice(device), "cudaSetDevice"); }

}  // namespace hybrid_ep
