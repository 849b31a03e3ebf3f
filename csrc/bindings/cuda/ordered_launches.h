// The launches of one engine, in order on the current streams of the threads that call.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "bindings/cuda/current_stream.h"
#include "runtime/launch_order.h"

namespace hybrid_ep::bindings {

// A thread's call of an engine, from construction to end. Another thread may be in one.
class OneCall {
 public:
  // `acquire` and `release` are methods of the engine's lock.
  OneCall(const pybind11::object& acquire, const pybind11::object& release)
      : release_(release), is_begun_(acquire(false).cast<bool>()) {}
  OneCall(const OneCall&) = delete;
  OneCall& operator=(const OneCall&) = delete;
  ~OneCall() {
    if (is_begun_) Py_XDECREF(PyObject_CallNoArgs(release_.ptr()));
  }

  // Whether no other thread is in a call.
  bool is_begun() const { return is_begun_; }

 private:
  const pybind11::object& release_;
  bool is_begun_;
};

class OrderedLaunches {
 public:
  // `current_stream` as CurrentStream takes it. `busy` is the lock that a thread holds while it is in a call.
  OrderedLaunches(int device, pybind11::object current_stream, const pybind11::object& busy)
      : current_(device, std::move(current_stream)),
        order_(device),
        acquire_(busy.attr("acquire")),
        release_(busy.attr("release")) {}

  // The stream of the next launch.
  cudaStream_t current() const { return current_.get(); }
  LaunchOrder& order() { return order_; }
  OneCall begin_call() const { return {acquire_, release_}; }

 private:
  CurrentStream current_;
  LaunchOrder order_;
  pybind11::object acquire_, release_;
};

}  // namespace hybrid_ep::bindings
