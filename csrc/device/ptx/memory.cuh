// Loads, stores and fences between GPUs, as PTX. Everything that synchronises two ranks goes through these.
#pragma once

#include <cstdint>

namespace hybrid_ep::ptx {

// Acquire: later reads of the calling thread see what the writer had written before it released the value.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// Relaxed: orders nothing, so later loads need not wait for it.
__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_relaxed_system(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// Relaxed. After a fence of the same thread it publishes as store_release_system does.
__device__ __forceinline__ void store_relaxed_system(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed_system(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// 16 bytes as one value: a load sees all of a store or nothing of it. Relaxed.
__device__ __forceinline__ uint4 load_relaxed_system(const uint4* address) {
  uint4 value;
  asm volatile(
      "{\n .reg .b128 value;\n .reg .b64 low, high;\n ld.relaxed.sys.global.b128 value, [%4];\n"
      " mov.b128 {low, high}, value;\n mov.b64 {%0, %1}, low;\n mov.b64 {%2, %3}, high;\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(address)
      : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed_system(uint4* address, const uint4& value) {
  asm volatile(
      "{\n .reg .b128 value;\n .reg .b64 low, high;\n mov.b64 low, {%1, %2};\n mov.b64 high, {%3, %4};\n"
      " mov.b128 value, {low, high};\n st.relaxed.sys.global.b128 [%0], value;\n}" ::"l"(address),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

// 16 bytes as one value, with acquire.
__device__ __forceinline__ uint4 load_acquire_system(const uint4* address) {
  uint4 value;
  asm volatile(
      "{\n .reg .b128 value;\n .reg .b64 low, high;\n ld.acquire.sys.global.b128 value, [%4];\n"
      " mov.b128 {low, high}, value;\n mov.b64 {%0, %1}, low;\n mov.b64 {%2, %3}, high;\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(address)
      : "memory");
  return value;
}

// Release: publishes the calling thread's earlier writes, and writes it has observed, to a thread that acquires the
// value.
__device__ __forceinline__ void store_release_system(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release_system(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Release at GPU scope.
__device__ __forceinline__ void store_release_gpu(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Release and acquire at CTA scope, for shared memory too.
__device__ __forceinline__ uint32_t load_acquire_cta(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_cta(uint32_t* address, uint32_t value) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

__device__ __forceinline__ uint32_t add_relaxed_gpu(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// Adds 1; wraps at 2³¹. NOTE: ptxas merges an atom.add of several lanes into one for the warp, and then waits for its
// result where it is issued. It does not merge atom.inc, so the result can be awaited later.
__device__ __forceinline__ uint32_t increment_relaxed_gpu(uint32_t* address) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(before) : "l"(address) : "memory");
  return before;
}

__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_acq_rel_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// 16 bytes that are read once: they need not stay in L1.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// Nanoseconds of a clock that all SMs share.
__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

}  // namespace hybrid_ep::ptx
