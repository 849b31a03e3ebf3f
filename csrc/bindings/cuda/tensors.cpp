#include "bindings/cuda/tensors.h"

#include <memory>
#include <utility>

#include "bindings/exchange_api.h"

namespace py = pybind11;

namespace hybrid_ep::bindings {
namespace {

// A tensor owns one.
struct Holder {
  dlpack::ManagedTensorVersioned managed{};
  std::vector<int64_t> shape;
  std::function<void()> release;
};

void delete_holder(dlpack::ManagedTensorVersioned* managed) {
  auto* holder = static_cast<Holder*>(managed->context);
  // At interpreter exit there is no Python to release anything, and the process gives its memory back anyway.
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  holder->release();
  delete holder;
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
  auto* holder = new Holder{{}, std::move(shape), std::move(release)};
  dlpack::ManagedTensorVersioned& managed = holder->managed;
  managed.version = {dlpack::kMajorVersion, dlpack::kMinorVersion};
  managed.context = holder;
  managed.deleter = &delete_holder;
  managed.tensor.data = reinterpret_cast<void*>(address);
  managed.tensor.device = {dlpack::kCuda, device};
  managed.tensor.num_dims = static_cast<int32_t>(holder->shape.size());
  managed.tensor.dtype = {type.code, type.bits, 1};
  managed.tensor.shape = holder->shape.data();
  void* tensor = nullptr;
  if (exchange_api().object_of(&managed, &tensor) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(tensor));
}

}  // namespace hybrid_ep::bindings
