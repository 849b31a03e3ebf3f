#include <cstdlib>
#include <cstring>
#include <new>

#include "transport/memory.h"

namespace hybrid_ep {
namespace {

Memory allocate(size_t num_bytes, bool is_device) {
  constexpr size_t kPage = 4096;
  const size_t rounded = (num_bytes + kPage - 1) / kPage * kPage;
  void* memory = std::aligned_alloc(kPage, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, rounded);
  return Memory(static_cast<uint8_t*>(memory), {is_device});
}

}  // namespace

void FreeMemory::operator()(uint8_t* memory) const { std::free(memory); }
Memory allocate_pinned(size_t num_bytes) { return allocate(num_bytes, false); }
Memory allocate_device(size_t num_bytes) { return allocate(num_bytes, true); }
DmaBuf export_dmabuf(uintptr_t, size_t) {
  DmaBuf buffer;
  buffer.reason = "host memory has none";
  return buffer;
}
void flush_gpu_direct_writes() {}
void use_device(int) {}

}  // namespace hybrid_ep
