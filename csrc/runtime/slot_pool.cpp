#include "runtime/slot_pool.h"

#include <utility>

#include "common/check.h"
#include "common/cuda_check.h"

namespace hybrid_ep {

SlotPool::SlotPool(int num_slots, CurrentStream current_stream)
    : slots_(num_slots > 0 ? num_slots - 1 : 0), current_stream_(std::move(current_stream)) {
  require(num_slots >= 1, "num_slots", num_slots, "≥ 1");
  for (Slot& slot : slots_) {
    check_cuda(cudaEventCreateWithFlags(&slot.event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

SlotPool::~SlotPool() {
  for (Slot& slot : slots_) cudaEventDestroy(slot.event);
}

bool SlotPool::note_use(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone) return false;
  was_captured_ = true;
  return true;
}

int SlotPool::take(cudaStream_t stream) {
  if (note_use(stream)) return 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.holders > 0) continue;
    if (slot.has_event) check_cuda(cudaStreamWaitEvent(stream, slot.event, 0), "cudaStreamWaitEvent");
    slot.holders = 1;
    return static_cast<int>(i) + 1;
  }
  return 0;
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
  // NOTE: a stream that is being captured takes no event; a capture begins only when the device is idle, so that
  // earlier users are done then.
  const std::optional<cudaStream_t> stream = current_stream_();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const bool recorded = stream.has_value() && cudaStreamIsCapturing(*stream, &status) == cudaSuccess &&
                        status == cudaStreamCaptureStatusNone &&
                        cudaEventRecord(slots_[slot_idx - 1].event, *stream) == cudaSuccess;
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_[slot_idx - 1].has_event = recorded;
  slots_[slot_idx - 1].holders = 0;
}

int SlotPool::num_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int count = 0;
  for (const Slot& slot : slots_) count += slot.holders == 0;
  return count;
}

}  // namespace hybrid_ep
