// The bulk copy engine (TMA without tensor maps) and the shared-memory barriers it completes on, as PTX.
// Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace hybrid_ep::ptx {

// An address in shared memory.
using SharedAddress = uint32_t;

// Volatile: the compiler keeps the result in a register, and does not compute it again in every turn of a loop.
__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  SharedAddress address;
  asm volatile("{\n .reg .u64 a;\n cvta.to.shared.u64 a, %1;\n cvt.u32.u64 %0, a;\n}" : "=r"(address) : "l"(pointer));
  return address;
}

__device__ __forceinline__ void barrier_init(SharedAddress barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes what the calling thread has seen in global memory, after another thread's flag, visible to the copy engine.
__device__ __forceinline__ void fence_global_for_bulk() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Makes ordinary accesses of the calling thread to shared memory visible to the copy engine.
__device__ __forceinline__ void fence_shared_for_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(SharedAddress barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}

// Waits for the phase to end. Only the local copy engine can delay it, so this wait needs no clock.
__device__ __forceinline__ void barrier_wait(SharedAddress barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

__device__ __forceinline__ void bulk_load(SharedAddress shared, const void* global, uint32_t num_bytes,
                                          SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(num_bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(num_bytes)
               : "memory");
}

// Bulk stores since the last commit form one group of the calling thread.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of the calling thread's groups still have shared memory to read.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until every byte of all but the latest kPending of the calling thread's groups is written at its destination.
template <int kPending>
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace hybrid_ep::ptx
