// csrc/device/ptx/memory.cuh on the CPU: acquire and release are the same for all, and every poll lets others run.
#pragma once

#include <chrono>

#include "cuda_runtime.h"

namespace hybrid_ep::ptx {

template <typename T>
T load(const T* address) {
  emulated::yield();
  const T value = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  emulated::note_load(address, value);
  return value;
}
inline uint32_t load_acquire_system(const uint32_t* address) { return load(address); }
inline uint64_t load_acquire_system(const uint64_t* address) { return load(address); }
inline uint32_t load_acquire_gpu(const uint32_t* address) { return load(address); }
inline uint32_t load_acquire_cta(const uint32_t* address) { return load(address); }
inline uint32_t load_relaxed_gpu(const uint32_t* address) { return load(address); }
inline uint64_t load_relaxed_system(const uint64_t* address) { return load(address); }
template <typename T>
void store_release_system(T* address, std::common_type_t<T> value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline void store_release_gpu(uint32_t* address, uint32_t value) { store_release_system(address, value); }
inline void store_release_cta(uint32_t* address, uint32_t value) { store_release_system(address, value); }
template <typename T>
void store_relaxed_system(T* address, std::common_type_t<T> value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
// The last word is stored last and loaded first: who sees it sees the others.
inline uint4 load_relaxed_system(const uint4* address) {
  const uint32_t last = load(&address->w);
  return {address->x, address->y, address->z, last};
}
inline uint4 load_acquire_system(const uint4* address) { return load_relaxed_system(address); }
inline void store_relaxed_system(uint4* address, const uint4& value) {
  address->x = value.x;
  address->y = value.y;
  address->z = value.z;
  __atomic_store_n(&address->w, value.w, __ATOMIC_RELEASE);
}
inline uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }
inline uint32_t add_relaxed_gpu(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }
inline uint32_t increment_relaxed_gpu(uint32_t* address) { return atomicAdd(address, 1u); }
inline void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_acq_rel_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline uint4 load_streaming(const void* address) { return *static_cast<const uint4*>(address); }
inline uint64_t clock_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace hybrid_ep::ptx
