#include "runtime/slot_pool.h"

#include "common/check.h"
#include "common/cuda_check.h"
#include "runtime/dlpack_abi.h"

namespace py = pybind11;

namespace hybrid_ep {
namespace {

struct Holder {
  dlpack::ManagedTensor managed{};
  std::shared_ptr<SlotPool> pool;
  int slot_idx = 0;
  std::vector<int64_t> shape;
};

void delete_holder(dlpack::ManagedTensor* managed) {
  auto* holder = static_cast<Holder*>(managed->context);
  // At interpreter exit there is no Python to ask for a stream, and the process gives its memory back anyway.
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  holder->pool->release(holder->slot_idx);
  delete holder;
}

// A capsule that no consumer has renamed still owns its tensor.
void delete_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

}  // namespace

SlotPool::SlotPool(uintptr_t base, int64_t slot_bytes, int num_slots, int device, py::object memory,
                   py::object current_stream)
    : base_(base),
      slot_bytes_(slot_bytes),
      device_(device),
      slots_(num_slots > 0 ? num_slots - 1 : 0),
      memory_(std::move(memory)),
      current_stream_(std::move(current_stream)) {
  require(num_slots >= 1, "num_slots", num_slots, "≥ 1");
  for (Slot& slot : slots_) {
    check_cuda(cudaEventCreateWithFlags(&slot.event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

SlotPool::~SlotPool() {
  for (Slot& slot : slots_) cudaEventDestroy(slot.event);
}

int SlotPool::take(cudaStream_t stream) {
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
  const std::lock_guard<std::mutex> lock(mutex_);
  ++slots_.at(slot_idx - 1).holders;
}

void SlotPool::release(int slot_idx) {
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

py::capsule SlotPool::tensor(int slot_idx, int64_t offset, const std::vector<int64_t>& shape, int code, int bits) {
  int64_t num_bytes = bits / 8;
  for (const int64_t size : shape) num_bytes *= size;
  require(offset >= 0 && offset + num_bytes <= slot_bytes_, "end of the tensor", offset + num_bytes,
          "within the slot's bytes");
  auto holder = std::make_unique<Holder>();
  holder->pool = shared_from_this();
  holder->slot_idx = slot_idx;
  holder->shape = shape;
  dlpack::Tensor& tensor = holder->managed.tensor;
  tensor.data = reinterpret_cast<void*>(base_ + slot_idx * slot_bytes_ + offset);
  tensor.device = {dlpack::kCuda, device_};
  tensor.num_dims = static_cast<int32_t>(shape.size());
  tensor.dtype = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  tensor.shape = holder->shape.data();
  holder->managed.context = holder.get();
  holder->managed.deleter = delete_holder;
  hold(slot_idx);
  return py::capsule(&holder.release()->managed, "dltensor", &delete_capsule);
}

int SlotPool::num_free() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int count = 0;
  for (const Slot& slot : slots_) count += slot.holders == 0;
  return count;
}

}  // namespace hybrid_ep
