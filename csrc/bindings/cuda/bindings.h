// Each concept of `_cuda` has one file here that adds its part to the module. Pointers and streams come as integers;
// the caller keeps the tensors alive and checks dtypes and shapes.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "kernels/link_kernels.h"
#include "runtime/communicator.h"

namespace hybrid_ep::calls {

void add_domain(pybind11::module_& module);
void add_low_latency(pybind11::module_& module);
void add_plans(pybind11::module_& module);
void add_slots(pybind11::module_& module);

}  // namespace hybrid_ep::calls

namespace hybrid_ep::bindings {

void add_balance(pybind11::module_& module);
void add_between(pybind11::module_& module);
void add_communicator(pybind11::module_& module);
void add_local_kernels(pybind11::module_& module);
void add_low_latency(pybind11::module_& module);
void add_ordered_launches(pybind11::module_& module);
void add_push_rows(pybind11::module_& module);
void add_route_memory(pybind11::module_& module);

// The kernels in a capsule that another module has passed; with None, this module's kernels.
LinkKernels link_kernels_of(const pybind11::object& capsule);

// Waits for the host counts of a dispatch, without the GIL; nullptr: the call has failed.
const HostCounts* wait_for_counts(const Communicator& communicator, uint32_t counts_epoch, cudaStream_t stream);
// The fields of HostCounts in hybrid_ep/engine/cuda/route.py; None for nullptr.
pybind11::object fields_of(const HostCounts* host_counts);

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}
inline DispatchTensors tensors_of(uintptr_t rows, uintptr_t topk_idx, uintptr_t topk_weights, uintptr_t scales,
                                  uintptr_t route, uintptr_t mapping_checksum = 0) {
  return {pointer<uint8_t>(rows),    pointer<int64_t>(topk_idx), pointer<float>(topk_weights),
          pointer<uint32_t>(scales), pointer<int32_t>(route),    pointer<int64_t>(mapping_checksum)};
}
inline cudaStream_t stream_of(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

}  // namespace hybrid_ep::bindings
