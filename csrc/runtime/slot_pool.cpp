#include "runtime/slot_pool.h"

#include <algorithm>
#include <utility>

#include "common/capture.h"
#include "common/check.h"
#include "common/cuda_check.h"
#include "common/device_guard.h"

namespace hybrid_ep {
namespace {

// Allowed while another thread captures.
bool have_passed(const std::vector<cudaEvent_t>& events, int num) {
  const RelaxedCaptureMode relaxed;
  return std::all_of(events.begin(), events.begin() + num,
                     [](cudaEvent_t e) { return is_done(cudaEventQuery(e), "cudaEventQuery"); });
}

void wait_for_events(const std::vector<cudaEvent_t>& events, int num, cudaStream_t stream) {
  for (int i = 0; i < num; ++i) check_cuda(cudaStreamWaitEvent(stream, events[i], 0), "cudaStreamWaitEvent");
}

void add_stream(std::vector<cudaStream_t>& streams, cudaStream_t stream) {
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

}  // namespace

SlotPool::SlotPool(int num_slots, int device, CurrentStream current_stream)
    : device_(device), slots_(num_slots > 0 ? num_slots - 1 : 0), current_stream_(std::move(current_stream)) {
  require(num_slots >= 1, "num_slots", num_slots, "≥ 1");
}

SlotPool::~SlotPool() {
  const RelaxedCaptureMode relaxed;
  for (Slot& slot : slots_) {
    for (const cudaEvent_t event : slot.events) cudaEventDestroy(event);
  }
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
    slot.streams.assign(1, stream);
    slot.holders = 1;
    return static_cast<int>(i) + 1;
  }
  return 0;
}

int SlotPool::take_captured(cudaStream_t stream, const Capture& capture) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.holders > 0 || slot.capture_id != capture.id || slot.num_events == 0) continue;
    wait_for_events(slot.events, slot.num_events, stream);
    slot.streams.assign(1, stream);
    slot.holders = 1;
    return static_cast<int>(i) + 1;
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    // A capture cannot wait for work outside of it, so it can only take a slot whose last use has ended.
    if (slot.holders > 0 || slot.capture_id != 0 || slot.has_unknown_users) continue;
    if (!have_passed(slot.events, slot.num_events)) continue;
    slot.graph_end = end_of(capture.graph);
    slot.capture_id = capture.id;
    slot.num_events = 0;
    slot.streams.assign(1, stream);
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
  } else {
    wait_for_events(slot.events, slot.num_events, stream);
  }
  return true;
}

void SlotPool::record_stream(int slot_idx, cudaStream_t stream) {
  if (slot_idx == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  add_stream(slots_.at(slot_idx - 1).streams, stream);
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
    slots_[slot_idx - 1].holders = 1;  // until its events are recorded
  }
  // NOTE: an event that is recorded in a captured stream belongs to the capture; streams outside cannot wait for it. So
  // the users of a slot that was taken outside of the capture are unknown then. A slot of the graph is taken again only
  // within the same capture, where the event serves.
  const std::optional<int> num_events = record(slots_[slot_idx - 1]);
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_[slot_idx - 1].num_events = num_events.value_or(0);
  slots_[slot_idx - 1].has_unknown_users = !num_events;
  slots_[slot_idx - 1].holders = 0;
}

std::optional<int> SlotPool::record(Slot& slot) const try {
  const std::optional<cudaStream_t> current = current_stream_();
  if (!current.has_value()) return std::nullopt;
  const DeviceGuard guard(device_);
  add_stream(slot.streams, *current);
  int num_events = 0;
  for (const cudaStream_t stream : slot.streams) {
    if (num_events == static_cast<int>(slot.events.size())) {
      cudaEvent_t event = nullptr;
      if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return std::nullopt;
      slot.events.push_back(event);
    }
    if (capture_of(stream).id != slot.capture_id) return std::nullopt;
    if (cudaEventRecord(slot.events[num_events++], stream) != cudaSuccess) return std::nullopt;
  }
  return num_events;
} catch (const CudaError&) {
  return std::nullopt;
}

int SlotPool::num_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int count = 0;
  for (const Slot& slot : slots_) count += slot.holders == 0 && (slot.capture_id == 0 || slot.graph_end->load());
  return count;
}

}  // namespace hybrid_ep
