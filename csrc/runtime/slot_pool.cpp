#include "runtime/slot_pool.h"

#include <utility>

#include "common/check.h"
#include "common/cuda_check.h"
#include "common/device_guard.h"

namespace hybrid_ep {

SlotPool::SlotPool(int num_slots, int device, CurrentStream current_stream)
    : device_(device), slots_(num_slots > 0 ? num_slots - 1 : 0), current_stream_(std::move(current_stream)) {
  require(num_slots >= 1, "num_slots", num_slots, "≥ 1");
  const DeviceGuard guard(device_);
  for (Slot& slot : slots_) {
    check_cuda(cudaEventCreateWithFlags(&slot.event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

SlotPool::~SlotPool() {
  for (Slot& slot : slots_) cudaEventDestroy(slot.event);
}

bool SlotPool::note_use(cudaStream_t stream) {
  const DeviceGuard guard(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone) return false;
  was_captured_ = true;
  return true;
}

int SlotPool::take(cudaStream_t stream) {
  if (note_use(stream)) return 0;
  const DeviceGuard guard(device_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.holders > 0) continue;
    if (!wait_for_users(slot, stream)) continue;
    slot.holders = 1;
    return static_cast<int>(i) + 1;
  }
  return 0;
}

// Makes the stream wait for who has used the slot. Returns false where that cannot be done now.
bool SlotPool::wait_for_users(Slot& slot, cudaStream_t stream) const {
  if (slot.has_unknown_users) {
    // A device that is being captured elsewhere cannot be waited for.
    if (cudaDeviceSynchronize() != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    slot.has_unknown_users = false;
  } else if (slot.has_event) {
    check_cuda(cudaStreamWaitEvent(stream, slot.event, 0), "cudaStreamWaitEvent");
  }
  return true;
}

void SlotPool::hold(int slot_idx) {
  if (slot_idx == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  ++slots_.at(slot_idx - 1).holders;
}

void SlotPool::release(int slot_idx) {
  if (slot_idx == 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--slots_.at(slot_idx - 1).holders > 0) return;
    slots_[slot_idx - 1].holders = 1;  // not free before its event is recorded
  }
  // NOTE: a stream that is being captured takes no event that others could wait for, and what it has held before may
  // still run.
  const bool recorded = record(slots_[slot_idx - 1].event);
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_[slot_idx - 1].has_event = recorded;
  slots_[slot_idx - 1].has_unknown_users = !recorded;
  slots_[slot_idx - 1].holders = 0;
}

bool SlotPool::record(cudaEvent_t event) const {
  const std::optional<cudaStream_t> stream = current_stream_();
  int before = 0;
  if (!stream.has_value() || cudaGetDevice(&before) != cudaSuccess) return false;
  if (before != device_ && cudaSetDevice(device_) != cudaSuccess) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const bool recorded = cudaStreamIsCapturing(*stream, &status) == cudaSuccess &&
                        status == cudaStreamCaptureStatusNone && cudaEventRecord(event, *stream) == cudaSuccess;
  if (before != device_) cudaSetDevice(before);
  return recorded;
}

int SlotPool::num_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int count = 0;
  for (const Slot& slot : slots_) count += slot.holders == 0;
  return count;
}

}  // namespace hybrid_ep
