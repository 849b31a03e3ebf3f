// Memory that kernels and the proxy share. memory_cuda.cpp is compiled into `_cuda`; memory_host.cpp, where kernels are
// emulated or absent, is plain host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hybrid_ep {

struct FreeMemory {
  bool is_device;
  void operator()(uint8_t* memory) const;
};
using Memory = std::unique_ptr<uint8_t[], FreeMemory>;

// Zeroed pinned memory, which host and GPU read and write at the same address.
Memory allocate_pinned(size_t num_bytes);
// Zeroed memory of the calling thread's current GPU.
Memory allocate_device(size_t num_bytes);

// A range of GPU memory, exported as a dma-buf for other devices.
struct DmaBuf {
  int file = -1;        // owned by the caller; −1: `reason` has why there is none
  uint64_t offset = 0;  // of the range in the file
  uint64_t address = 0, num_bytes = 0;
  std::string reason;
};
DmaBuf export_dmabuf(uintptr_t memory, size_t num_bytes);

// Orders a NIC's write to the memory of the current GPU, whose completion the calling thread has seen, before the
// thread's next writes: a kernel of that GPU that sees these sees the NIC's write, too.
void flush_gpu_direct_writes();

// Makes a GPU the calling thread's current one.
void use_device(int device);

}  // namespace hybrid_ep
