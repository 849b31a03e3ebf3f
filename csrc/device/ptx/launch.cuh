// Programmatic dependent launch: a kernel that was launched for it may start while the one before it still runs.
#pragma once

namespace hybrid_ep::ptx {

// Once every CTA has called this or ended, the next kernel of the stream may start if it was launched to do so.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernels before have ended and their writes can be seen; returns at once in an ordinary launch.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace hybrid_ep::ptx
