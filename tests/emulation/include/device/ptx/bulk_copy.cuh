// csrc/device/ptx/bulk_copy.cuh on the CPU: copies happen later (emulator.h).
#pragma once

#include "cuda_runtime.h"

namespace hybrid_ep::ptx {

using SharedAddress = uintptr_t;

inline SharedAddress shared_address(const void* pointer) { return reinterpret_cast<SharedAddress>(pointer); }
inline emulated::Barrier& barrier_at(SharedAddress address) { return *reinterpret_cast<emulated::Barrier*>(address); }

inline void barrier_init(SharedAddress barrier, uint32_t arrivals) {
  const auto count = static_cast<uint8_t>(arrivals);
  barrier_at(barrier) = {0, count, count, 0};
}
inline void fence_barrier_init() {}
inline void fence_global_for_bulk() {}
inline void fence_shared_for_bulk() {}
inline void barrier_expect(SharedAddress barrier, uint32_t num_bytes) {
  emulated::Barrier& it = barrier_at(barrier);
  it.bytes_left += static_cast<int32_t>(num_bytes);
  --it.arrivals_left;
  it.update();
}
inline void barrier_wait(SharedAddress barrier, uint32_t parity) {
  while (barrier_at(barrier).phase == parity) emulated::yield();
}
inline void bulk_load(SharedAddress shared, const void* global, uint32_t num_bytes, SharedAddress barrier) {
  emulated::load_later(reinterpret_cast<void*>(shared), global, num_bytes, &barrier_at(barrier));
}
inline void bulk_store(void* global, const void* shared, uint32_t num_bytes) {
  emulated::store_later(global, shared, num_bytes);
}
inline void bulk_commit() { emulated::commit_stores(); }
template <int kPending>
void bulk_wait_read() {
  emulated::wait_stores_read(kPending);
}
template <int kPending>
void bulk_wait_written() {
  emulated::wait_stores_written(kPending);
}

}  // namespace hybrid_ep::ptx
