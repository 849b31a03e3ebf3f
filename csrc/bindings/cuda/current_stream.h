// The stream of a call.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

namespace hybrid_ep::bindings {

// The calling thread's current stream of a GPU, as torch knows it.
class CurrentStream {
 public:
  // `of_device` takes a device and returns its stream as an integer.
  CurrentStream(int device, pybind11::object of_device) : device_(device), of_device_(std::move(of_device)) {}

  // The caller has the GIL.
  cudaStream_t get() const { return reinterpret_cast<cudaStream_t>(of_device_(device_).cast<uintptr_t>()); }

 private:
  int device_;
  pybind11::object of_device_;
};

}  // namespace hybrid_ep::bindings
