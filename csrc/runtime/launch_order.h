// The order of launches whose kernels use the same memory, or could keep each other from running.
//
// The launches of one engine run one after another, whatever their streams. As long as all are on one stream that costs
// nothing. From the first change on, an event follows each launch, so that a launch on another stream waits for the one
// before and not for what else that stream holds.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

namespace hybrid_ep {

// Its calls are made by one thread at a time, as are those of all other orders.
class LaunchOrder {
 public:
  explicit LaunchOrder(int device);
  ~LaunchOrder();
  LaunchOrder(const LaunchOrder&) = delete;
  LaunchOrder& operator=(const LaunchOrder&) = delete;

  // Must be called before a call's first launch, which will be on `stream`.
  void begin(cudaStream_t stream);
  // In place of begin(), for a low-latency launch: it also runs after the low-latency launches of all other buffers
  // here. A kernel that receives waits on every SM. Two such kernels, of two buffers, could leave no SM for the sends
  // that another rank waits for.
  void begin_low_latency(cudaStream_t stream);
  // Must be called after a call's last launch, and last use of memory that its next call may write.
  void end();

 private:
  // Makes `stream` wait for the last launch, which is on another stream.
  void hold_back(cudaStream_t stream);

  int device_;
  std::optional<cudaStream_t> last_;
  std::optional<cudaEvent_t> event_;  // made when streams first change
  bool is_recorded_ = false;          // whether the event is recorded after the last launch
};

}  // namespace hybrid_ep
