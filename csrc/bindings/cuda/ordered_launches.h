// The launches of one engine, in order on the current streams of the threads that call.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "bindings/cuda/current_stream.h"
#include "runtime/launch_order.h"

namespace hybrid_ep::bindings {

class OrderedLaunches {
 public:
  // `current_stream` as CurrentStream takes it.
  OrderedLaunches(int device, pybind11::object current_stream)
      : current_(device, std::move(current_stream)), order_(device) {}

  // The stream of the next launch.
  cudaStream_t current() const { return current_.get(); }
  LaunchOrder& order() { return order_; }

 private:
  CurrentStream current_;
  LaunchOrder order_;
};

}  // namespace hybrid_ep::bindings
