#include "runtime/slot_pool.h"

#include <utility>

#include "common/capture.h"
#include "common/check.h"
#include "common/cuda_check.h"
#include "common/device_guard.h"

namespace hybrid_ep {
namespace {

// Allowed while another thread captures.
bool has_passed(cudaEvent_t event) {
  const RelaxedCaptureMode relaxed;
  return is_done(cudaEventQuery(event), "cudaEventQuery");
}

}  // namespace

SlotPool::SlotPool(int num_slots, int device, CurrentStream current_stream)
    : device_(device), slots_(num_slots > 0 ? num_slots - 1 : 0), current_stream_(std::move(current_stream)) {
  require(num_slots >= 1, "num_slots", num_slots, "≥ 1");
  const DeviceGuard guard(device_);
  for (Slot& slot : slots_) {
    check_cuda(cudaEventCreateWithFlags(&slot.event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

SlotPool::~SlotPool() {
  const RelaxedCaptureMode relaxed;
  for (Slot& slot : slots_) cudaEventDestroy(slot.event);
}

void SlotPool::note_use(cudaStream_t stream) {
  const DeviceGuard guard(device_);
  was_captured_ |= capture_of(stream).id != 0;
}

SlotPool::Taken SlotPool::take(cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const Capture capture = capture_of(stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capture.id == 0) return {take_eager(stream), false};
  was_captured_ = true;
  return {take_captured(stream, capture), true};
}

int SlotPool::take_eager(cudaStream_t stream) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.holders > 0) continue;
    if (slot.capture_id != 0) {
      if (!slot.graph_end->load()) continue;
      slot.capture_id = 0;
      slot.graph_end.reset();
      slot.has_unknown_users = true;  // the last replay may still run
    }
    if (!wait_for_users(slot, stream)) continue;
    slot.holders = 1;
    return static_cast<int>(i) + 1;
  }
  return 0;
}

int SlotPool::take_captured(cudaStream_t stream, const Capture& capture) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.holders > 0 || slot.capture_id != capture.id || !slot.has_event) continue;
    check_cuda(cudaStreamWaitEvent(stream, slot.event, 0), "cudaStreamWaitEvent");
    slot.holders = 1;
    return static_cast<int>(i) + 1;
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    // A capture cannot wait for work outside of it, so it can only take a slot whose last use has ended.
    if (slot.holders > 0 || slot.capture_id != 0 || slot.has_unknown_users) continue;
    if (slot.has_event && !has_passed(slot.event)) continue;
    slot.graph_end = end_of(capture.graph);
    slot.capture_id = capture.id;
    slot.has_event = false;
    slot.holders = 1;
    return static_cast<int>(i) + 1;
  }
  return 0;
}

// Makes the stream wait for the last users of the slot. Returns false if that is not possible now.
bool SlotPool::wait_for_users(Slot& slot, cudaStream_t stream) const {
  if (slot.has_unknown_users) {
    // The call fails while another thread captures a stream of the device.
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
    slots_[slot_idx - 1].holders = 1;  // until its event is recorded
  }
  // NOTE: an event that is recorded in a captured stream belongs to the capture; streams outside cannot wait for it. So
  // the users of a slot that was taken outside of the capture are unknown then. A slot of the graph is taken again only
  // within the same capture, where the event serves.
  const bool recorded = record(slots_[slot_idx - 1].event, slots_[slot_idx - 1].capture_id);
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_[slot_idx - 1].has_event = recorded;
  slots_[slot_idx - 1].has_unknown_users = !recorded;
  slots_[slot_idx - 1].holders = 0;
}

bool SlotPool::record(cudaEvent_t event, unsigned long long capture_id) const try {
  const std::optional<cudaStream_t> stream = current_stream_();
  if (!stream.has_value()) return false;
  const DeviceGuard guard(device_);
  return capture_of(*stream).id == capture_id && cudaEventRecord(event, *stream) == cudaSuccess;
} catch (const CudaError&) {
  return false;
}

int SlotPool::num_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int count = 0;
  for (const Slot& slot : slots_) count += slot.holders == 0 && (slot.capture_id == 0 || slot.graph_end->load());
  return count;
}

}  // namespace hybrid_ep
