#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstring>

#include "common/capture.h"
#include "common/cuda_check.h"
#include "transport/cuda_driver.h"
#include "transport/memory.h"

namespace hybrid_ep {

void FreeMemory::operator()(uint8_t* memory) const {
  const RelaxedCaptureMode relaxed;
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

DmaBuf export_dmabuf(uintptr_t memory, size_t num_bytes) {
  using GetHandle = CUresult (*)(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long);
  DmaBuf buffer;
  GetHandle get_handle = nullptr;
  try {
    get_handle = find_driver_function<GetHandle>("cuMemGetHandleForAddressRange");  // of CUDA 11.7
  } catch (const CudaError& error) {
    buffer.reason = error.what();
    return buffer;
  }
  // The driver exports whole pages.
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = memory / page * page, end = (memory + num_bytes + page - 1) / page * page;
  int file = -1;
  const CUresult status = get_handle(&file, begin, end - begin, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  if (status != CUDA_SUCCESS) {
    buffer.reason = "cuMemGetHandleForAddressRange: error " + std::to_string(status);
    return buffer;
  }
  buffer.file = file;
  buffer.offset = memory - begin;
  buffer.address = memory;
  buffer.num_bytes = num_bytes;
  return buffer;
}

void flush_gpu_direct_writes() {
  check_cuda(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                cudaFlushGPUDirectRDMAWritesToOwner),
             "cudaDeviceFlushGPUDirectRDMAWrites");
}

void use_device(int device) { check_cuda(cudaSetDevice(device), "cudaSetDevice"); }

}  // namespace hybrid_ep
