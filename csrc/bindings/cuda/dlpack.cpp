#include "bindings/cuda/dlpack.h"

#include <memory>
#include <utility>

#include "bindings/dlpack_abi.h"

namespace py = pybind11;

namespace hybrid_ep::bindings {
namespace {

struct Holder {
  dlpack::ManagedTensor managed{};
  std::vector<int64_t> shape;
  std::function<void()> release;
};

void delete_holder(dlpack::ManagedTensor* managed) {
  auto* holder = static_cast<Holder*>(managed->context);
  // At interpreter exit there is no Python to release anything, and the process gives its memory back anyway.
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  holder->release();
  delete holder;
}

// A capsule that no consumer has renamed still owns its tensor.
void delete_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

}  // namespace

py::capsule make_capsule(uintptr_t address, std::vector<int64_t> shape, ElementType type, int device,
                         std::function<void()> release) {
  auto holder = std::make_unique<Holder>();
  holder->shape = std::move(shape);
  holder->release = std::move(release);
  dlpack::Tensor& tensor = holder->managed.tensor;
  tensor.data = reinterpret_cast<void*>(address);
  tensor.device = {dlpack::kCuda, device};
  tensor.num_dims = static_cast<int32_t>(holder->shape.size());
  tensor.dtype = {type.code, type.bits, 1};
  tensor.shape = holder->shape.data();
  holder->managed.context = holder.get();
  holder->managed.deleter = delete_holder;
  return py::capsule(&holder.release()->managed, "dltensor", &delete_capsule);
}

}  // namespace hybrid_ep::bindings
