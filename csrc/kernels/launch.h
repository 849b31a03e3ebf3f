// How the runtime starts the kernels.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda_check.h"
#include "kernels/params.h"

namespace hybrid_ep {

constexpr int kDispatchThreads = 512;
constexpr int kMaxSendWarps = 4;

// Shared memory that a CTA can have, and what it may ask for beside what most kernels declare.
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kDynamicSharedBytes = 212 * 1024;

// Whether the kernels were built for the current device.
bool can_run_kernels();

// Allows the kernels that much on the current device; once for each device, before they are launched.
void prepare_dispatch();
void prepare_combine();
void prepare_duplicate();

// Each launches on the stream and returns; shared_bytes is dynamic shared memory for the rings and the counters.
// Throws CudaError if the launch is refused.
void launch_dispatch(const DispatchParams& params, int num_sms, int shared_bytes, cudaStream_t stream);
void launch_combine(const CombineParams& params, int num_expert_sms, cudaStream_t stream);
void launch_duplicate(const DuplicateParams& params, int num_sms, cudaStream_t stream);
// `totals_are_zero`: they need not be cleared.
void launch_layout(const LayoutParams& params, bool totals_are_zero, cudaStream_t stream);
// K is 1 … 32.
void launch_weights_to_probs(const ProbsParams& params, cudaStream_t stream);
void launch_probs_to_weights(const ProbsParams& params, cudaStream_t stream);

template <typename Params>
void allow_shared_memory(void (*kernel)(Params), int num_bytes = kDynamicSharedBytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, num_bytes),
             "cudaFuncSetAttribute");
}

// Asks for as much shared memory as an SM can have: it is divided anew only while nothing runs there, so that kernels
// which shall run beside each other ask for the same.
template <typename Params>
void prefer_shared_memory(void (*kernel)(Params)) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      "cudaFuncSetAttribute");
}

// How a kernel may start.
enum class LaunchKind {
  kPlain,
  kCooperative,  // all CTAs run at once or the kernel waits, so that CTAs may wait for each other
  // While the kernel before it still runs; it calls wait_for_previous_kernel() before it writes what that kernel may
  // know.
  kEarly
};

// The one way to launch a kernel. The status is this launch's alone: cudaGetLastError() after <<<>>> would also return
// older errors of others, and a launch that is refused leaves none for them. Throws CudaError if it is refused.
template <typename Params>
void launch_kernel(LaunchKind kind, void (*kernel)(Params), const Params& params, dim3 num_ctas, int num_threads,
                   int shared_bytes, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = num_ctas;
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  if (kind == LaunchKind::kCooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = &attribute;
  config.numAttrs = kind == LaunchKind::kPlain ? 0 : 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, params);
  if (status != cudaSuccess) cudaGetLastError();
  check_cuda(status, "cudaLaunchKernelEx");
}

}  // namespace hybrid_ep
