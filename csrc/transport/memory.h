// Memory that kernels and the proxy share. memory_cuda.cpp is compiled into `_cuda`; memory_host.cpp, where kernels are
// emulated or absent, is plain host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace hybrid_ep {

struct FreeMemory {
  bool is_device;
  void operator()(uint8_t* memory) const;
};
using Memory = std::unique_ptr<uint8_t[], FreeMemory>;

// Zeroed. Pinned memory is read and written by host and GPU at the same address.
Memory allocate_pinned(size_t num_bytes);
// Zeroed, on the calling thread's current GPU.
Memory allocate_device(size_t num_bytes);

// Makes a GPU the calling thread's current one.
void use_device(int device);

}  // namespace hybrid_ep
