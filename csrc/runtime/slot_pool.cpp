#include "runtime/slot_pool.h"

#include <utility>

#include "common/check.h"
#include "common/cuda_check.h"

namespace py = pybind11;

namespace hybrid_ep {

SlotPool::SlotPool(uintptr_t base, int64_t slot_bytes, int num_slots, int device, py::object memory,
                   py::object current_stream, py::object from_dlpack)
    : base_(base),
      slot_bytes_(slot_bytes),
      device_(device),
      slots_(num_slots > 0 ? num_slots - 1 : 0),
      memory_(std::move(memory)),
      current_stream_(std::move(current_stream)),
      from_dlpack_(std::move(from_dlpack)) {
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
  // NOTE: this runs in tensor destructors, so it must not throw. A stream that is being captured takes no event; a
  // capture begins only when the device is idle, so that earlier users are done then.
  bool recorded = false;
  try {
    const auto stream = reinterpret_cast<cudaStream_t>(current_stream_(device_).cast<uintptr_t>());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    recorded = cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone &&
               cudaEventRecord(slots_[slot_idx - 1].event, stream) == cudaSuccess;
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("hybrid_ep: release of a receive slot");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_[slot_idx - 1].has_event = recorded;
  slots_[slot_idx - 1].holders = 0;
}

py::tuple SlotPool::tensors(int slot_idx, const DispatchPlan& plan, int64_t num_rows, const py::object& memory,
                            uintptr_t route) {
  const RowFormat& format = plan.format;
  const SlotLayout layout = make_slot_layout(format.widths(), slot_bytes_);
  require(num_rows <= layout.capacity, "rows of a result", num_rows, "what a slot holds");
  py::object experts = py::none(), weights = py::none(), scales = py::none();
  py::object rank_prefix = py::none(), counts = py::none(), overflow = py::none();
  py::object rows = slot_tensor(slot_idx, layout.rows, num_rows, format.rows);
  const bool is_permuted = plan.pad_multiple > 0;
  if (!is_permuted) {
    experts = slot_tensor(slot_idx, layout.experts, num_rows, format.experts);
    weights = slot_tensor(slot_idx, layout.weights, num_rows, format.weights);
    scales = slot_tensor(slot_idx, layout.scales, num_rows, format.scales);
  }
  release(slot_idx);
  if (plan.makes_route) {
    const auto part = [&](int64_t offset, std::vector<int64_t> shape) {
      return route_tensor(memory, route + offset * sizeof(int32_t), std::move(shape));
    };
    rank_prefix = part(plan.route.rank_prefix, {plan.num_ranks, plan.num_ranks});
    if (is_permuted) {
      counts = part(plan.route.num_tokens_per_expert, {plan.num_experts / plan.num_ranks});
      overflow = part(plan.route.overflow, {1});
    }
  }
  return py::make_tuple(rows, experts, weights, scales, rank_prefix, counts, overflow);
}

py::object SlotPool::slot_tensor(int slot_idx, int64_t offset, int64_t num_rows, const Columns& columns) {
  if (columns.num == 0) return py::none();
  hold(slot_idx);
  return from_dlpack_(make_capsule(base_ + slot_idx * slot_bytes_ + offset, {num_rows, columns.num}, columns.type,
                                   device_, [pool = shared_from_this(), slot_idx] { pool->release(slot_idx); }));
}

py::object SlotPool::route_tensor(const py::object& memory, uintptr_t address, std::vector<int64_t> shape) {
  return from_dlpack_(make_capsule(address, std::move(shape), {kInt, 32}, device_, [memory] {}));
}

int SlotPool::num_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int count = 0;
  for (const Slot& slot : slots_) count += slot.holders == 0;
  return count;
}

}  // namespace hybrid_ep
