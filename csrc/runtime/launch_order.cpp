#include "runtime/launch_order.h"

#include <map>

#include "common/capture.h"
#include "common/cuda_check.h"
#include "common/device_guard.h"

namespace hybrid_ep {
namespace {

// By device: the order whose low-latency launch was the last one.
std::map<int, LaunchOrder*>& last_low_latency() {
  static auto* const last = new std::map<int, LaunchOrder*>;  // orders may outlive static objects
  return *last;
}

}  // namespace

LaunchOrder::LaunchOrder(int device) : device_(device) {}

LaunchOrder::~LaunchOrder() {
  const auto last = last_low_latency().find(device_);
  if (last != last_low_latency().end() && last->second == this) last_low_latency().erase(last);
  if (event_) {
    const RelaxedCaptureMode relaxed;
    cudaEventDestroy(*event_);
  }
}

void LaunchOrder::begin(cudaStream_t stream) {
  if (last_ != stream) {
    hold_back(stream);
    last_ = stream;
  }
  is_recorded_ = false;
}

void LaunchOrder::begin_low_latency(cudaStream_t stream) {
  LaunchOrder*& last = last_low_latency()[device_];
  if (last != this) {
    if (last != nullptr && last->last_ != stream) last->hold_back(stream);
    last = this;
  }
  begin(stream);
}

void LaunchOrder::end() {
  if (!event_ || !last_) return;
  const DeviceGuard guard(device_);
  if (capture_of(*last_).id != 0) return;
  check_cuda(cudaEventRecord(*event_, *last_), "cudaEventRecord");
  is_recorded_ = true;
}

void LaunchOrder::hold_back(cudaStream_t stream) {
  if (!last_) return;
  const DeviceGuard guard(device_);
  if (!event_) {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    event_ = event;
  }
  // Captured work can only wait for work of the same capture. A capture begins when the device is idle, so its first
  // call need not wait.
  const auto capture = capture_of(stream).id;
  if (capture != 0 || !is_recorded_) {
    if (capture_of(*last_).id != capture) return;
    check_cuda(cudaEventRecord(*event_, *last_), "cudaEventRecord");
  }
  check_cuda(cudaStreamWaitEvent(stream, *event_, 0), "cudaStreamWaitEvent");
}

}  // namespace hybrid_ep
