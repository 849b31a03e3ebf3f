// The stream of a call.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

namespace hybrid_ep::bindings {

// The calling thread's current stream of a GPU, as torch knows it.
class CurrentStream {
 public:
  // `by_python` takes a device and returns its stream as an integer. It is called where torch has
  // no exchange API.
  CurrentStream(int device, pybind11::object by_python);

  // The caller has the GIL.
  cudaStream_t get() const;

 private:
  int device_;
  pybind11::object by_python_;
};

}  // namespace hybrid_ep::bindings
