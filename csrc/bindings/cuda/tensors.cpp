#include "bindings/cuda/tensors.h"

#include <memory>
#include <utility>

#include "bindings/exchange_api.h"

namespace py = pybind11;

namespace hybrid_ep::bindings {
namespace {

// What a tensor owns. Managed is a ManagedTensor or a ManagedTensorVersioned.
template <typename Managed>
struct Holder {
  Managed managed{};
  std::vector<int64_t> shape;
  std::function<void()> release;
};

template <typename Managed>
void delete_holder(Managed* managed) {
  auto* holder = static_cast<Holder<Managed>*>(managed->context);
  // At interpreter exit there is no Python to release anything, and the process gives its memory back anyway.
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  holder->release();
  delete holder;
}

template <typename Managed>
Managed* make_managed(uintptr_t address, std::vector<int64_t> shape, ElementType type, int device,
                      std::function<void()> release) {
  auto* holder = new Holder<Managed>{{}, std::move(shape), std::move(release)};
  dlpack::Tensor& tensor = holder->managed.tensor;
  tensor.data = reinterpret_cast<void*>(address);
  tensor.device = {dlpack::kCuda, device};
  tensor.num_dims = static_cast<int32_t>(holder->shape.size());
  tensor.dtype = {type.code, type.bits, 1};
  tensor.shape = holder->shape.data();
  holder->managed.context = holder;
  holder->managed.deleter = delete_holder<Managed>;
  return &holder->managed;
}

// A capsule that no consumer has renamed still owns its tensor.
void delete_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

bool can_import_float8() {
  const py::module_ torch = py::module_::import("torch");
  try {
    const py::object dtype = torch.attr("float8_e4m3fn");
    torch.attr("from_dlpack")(torch.attr("empty")(1, py::arg("dtype") = dtype, py::arg("device") = "cpu"));
    return true;
  } catch (py::error_already_set&) {
    return false;
  }
}

// Whether torch makes tensors of e4m3fn from DLPack.
bool takes_float8() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<bool> takes;
  return takes.call_once_and_store_result(&can_import_float8).get_stored();
}

}  // namespace

py::object make_tensor(uintptr_t address, std::vector<int64_t> shape, ElementType type, int device,
                       std::function<void()> release) {
  if (type.code == kFloat8 && !takes_float8()) {
    return make_tensor(address, std::move(shape), {kBytes, 8}, device, std::move(release))
        .attr("view")(py::module_::import("torch").attr("float8_e4m3fn"));
  }
  const dlpack::ExchangeApi* api = exchange_api();
  if (api == nullptr) {
    return py::module_::import("torch").attr("from_dlpack")(
        py::capsule(make_managed<dlpack::ManagedTensor>(address, std::move(shape), type, device, std::move(release)),
                    "dltensor", &delete_capsule));
  }
  auto* managed =
      make_managed<dlpack::ManagedTensorVersioned>(address, std::move(shape), type, device, std::move(release));
  managed->version = {dlpack::kMajorVersion, dlpack::kMinorVersion};
  void* tensor = nullptr;
  if (api->object_of(managed, &tensor) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(tensor));
}

}  // namespace hybrid_ep::bindings
