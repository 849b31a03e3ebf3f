// Makes a GPU the calling thread's current one for as long as the guard lives: a launch goes to the current GPU, and a
// new thread begins with the first, whatever the others have set.
#pragma once

#include "common/cuda_check.h"

namespace hybrid_ep {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_, before_ = 0;
};

}  // namespace hybrid_ep
