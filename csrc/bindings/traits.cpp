// What checks of a call's arguments read, in one call. Python would take as long for each attribute as this does for a
// tensor.
#include "bindings/traits.h"

#include <algorithm>
#include <string>

#include "bindings/bindings.h"
#include "bindings/exchange_api.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

constexpr int kMaxDims = 8;

// What follows: what an argument is. A tensor is kTensor, its facts and sizes; an integer its value; a tuple the number
// of its entries, and each of them.
enum Kind : uint8_t { kNone, kFalse, kTrue, kInt, kTuple, kObject, kTensor };
constexpr int64_t kAnyRows = -1;  // in place of a first size that need not be the same

struct Facts {
  dlpack::Device device;
  dlpack::DataType dtype;
  int16_t num_dims;
  bool is_contiguous, keeps_grad;
};
static_assert(sizeof(Facts) == 16, "has no padding");

bool is_contiguous(const dlpack::Tensor& tensor) {
  if (tensor.strides == nullptr) return true;
  bool is_packed = true;
  int64_t stride = 1;
  for (int i = tensor.num_dims - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    if (tensor.shape[i] == 1) continue;
    is_packed &= tensor.strides[i] == stride;
    stride *= tensor.shape[i];
  }
  return is_packed;
}

// What is needed of torch.
class Torch {
 public:
  Torch()
      : module_(py::module_::import("torch")),
        tensor_type_(module_.attr("Tensor")),
        is_grad_enabled_(module_.attr("is_grad_enabled")),
        is_tracing_(module_.attr("_C").attr("_is_tracing")),
        num_modes_(module_.attr("_C").attr("_len_torch_dispatch_stack")),
        mode_of_(module_.attr("_C").attr("_get_dispatch_mode")),
        tracers_(module_.attr("_C").attr("_TorchDispatchModeKey").attr("__members__").attr("values")()),
        transform_(module_.attr("_C").attr("_functorch").attr("peek_interpreter_stack")) {
    const dlpack::ExchangeApi* api = exchange_api();
    if (api != nullptr) describe_ = api->describe;
  }

  static const Torch& get() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> stored;
    return stored.call_once_and_store_result([] { return Torch(); }).get_stored();
  }

  // Returns false, maybe with a Python error, for anything but a tensor of torch's own class that has memory.
  bool describe(PyObject* object, dlpack::Tensor* tensor) const {
    return describe_ != nullptr && Py_IS_TYPE(object, reinterpret_cast<PyTypeObject*>(tensor_type_.ptr())) &&
           describe_(object, tensor) == 0;
  }
  // Whether what is computed from a tensor has a gradient; −1: a Python error.
  int has_gradient(PyObject* tensor) const {
    const auto requires_grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor, requires_grad_.ptr()));
    if (!requires_grad || requires_grad.ptr() != Py_True) return requires_grad ? 0 : -1;
    const auto is_enabled = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(is_grad_enabled_.ptr()));
    return is_enabled ? is_enabled.ptr() == Py_True : -1;
  }

  bool is_traced() const {
    if (is_tracing_().ptr() != Py_False || !transform_().is_none()) return true;
    // Any mode of torch.utils is on this stack, and few are a tracer's.
    if (num_modes_().equal(py::int_(0))) return false;
    for (const py::handle tracer : tracers_) {
      if (!mode_of_(tracer).is_none()) return true;
    }
    return false;
  }

 private:
  py::object module_, tensor_type_, is_grad_enabled_, is_tracing_, num_modes_, mode_of_;
  py::tuple tracers_;
  py::object transform_;
  py::str requires_grad_ = "requires_grad";
  int (*describe_)(void*, dlpack::Tensor*) = nullptr;
};

// Bytes for all arguments but the first `num_skipped`; if one cannot be described, what `of_any` returns for them all.
PyObject* traits_of(PyObject* of_any, PyObject* const* objects, Py_ssize_t num_objects, Py_ssize_t num_skipped,
                    std::optional<int64_t> num_rows) {
  TraitsOfArguments found;
  found.set_num_rows(num_rows);
  bool all = !is_traced();
  for (Py_ssize_t i = num_skipped; all && i < num_objects; ++i) all = found.add(objects[i]);
  return all ? found.as_bytes() : PyObject_Vectorcall(of_any, objects, num_objects, nullptr);
}

PyObject* traits(PyObject* of_any, PyObject* const* objects, Py_ssize_t num_objects) try {
  return traits_of(of_any, objects, num_objects, 0, std::nullopt);
} catch (py::error_already_set& error) {
  error.restore();
  return nullptr;
}

// The first argument is a number of rows. A tensor with so many has the same traits as with any other such number.
PyObject* row_traits(PyObject* of_any, PyObject* const* objects, Py_ssize_t num_objects) try {
  const int64_t num_rows = num_objects > 0 ? PyLong_AsLongLong(objects[0]) : -1;
  if (PyErr_Occurred() != nullptr) return nullptr;
  return traits_of(of_any, objects, num_objects, 1, num_rows);
} catch (py::error_already_set& error) {
  error.restore();
  return nullptr;
}

}  // namespace

bool is_traced() { return Torch::get().is_traced(); }

bool TraitsOfArguments::add(PyObject* object) {
  if (object == Py_None) return add_kind(kNone);
  if (object == Py_False || object == Py_True) return add_kind(object == Py_True ? kTrue : kFalse);
  if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 && add_int(value);
  }
  if (PyTuple_CheckExact(object)) {
    const Py_ssize_t num = PyTuple_GET_SIZE(object);
    bool all = add_kind(kTuple) && append(&num, sizeof(num));
    for (Py_ssize_t i = 0; all && i < num; ++i) {
      PyObject* const item = PyTuple_GET_ITEM(object, i);
      all = !PyTuple_CheckExact(item) && add(item);
    }
    return all;
  }
  if (add_tensor(object)) return true;
  PyErr_Clear();
  return false;
}

bool TraitsOfArguments::add(PyObject* object, const std::vector<py::object>& attributes) {
  if (!add_kind(kObject) || !add_identity(Py_TYPE(object))) return false;
  for (const py::object& name : attributes) {
    const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name.ptr()));
    if (!value) PyErr_Clear();
    if (!value || !(PyLong_CheckExact(value.ptr()) ? add(value.ptr()) : add_identity(value.ptr()))) return false;
  }
  return true;
}

bool TraitsOfArguments::add_identity(const void* object) { return append(&object, sizeof(object)); }

bool TraitsOfArguments::add_kind(uint8_t kind) { return append(&kind, sizeof(kind)); }

bool TraitsOfArguments::add_int(int64_t value) { return add_kind(kInt) && append(&value, sizeof(value)); }

bool TraitsOfArguments::add_tensor(PyObject* object) {
  const Torch& torch = Torch::get();
  dlpack::Tensor tensor{};
  if (!torch.describe(object, &tensor) || tensor.num_dims > kMaxDims) return false;
  const bool is_integer = tensor.dtype.code == dlpack::kInt || tensor.dtype.code == dlpack::kUInt;
  const int keeps_grad = is_integer ? 0 : torch.has_gradient(object);  // asking costs as much as the rest
  if (keeps_grad < 0) return false;
  const auto num_dims = static_cast<int16_t>(tensor.num_dims);
  const Facts facts{tensor.device, tensor.dtype, num_dims, is_contiguous(tensor), keeps_grad == 1};
  int64_t sizes[kMaxDims];
  std::copy_n(tensor.shape, num_dims, sizes);
  if (num_rows_ && num_dims > 0 && sizes[0] == *num_rows_) sizes[0] = kAnyRows;
  return add_kind(kTensor) && append(&facts, sizeof(facts)) && append(sizes, num_dims * sizeof(int64_t));
}

bool TraitsOfArguments::append(const void* from, size_t num_bytes) {
  if (num_bytes > sizeof(bytes_) - num_bytes_) return false;
  std::copy_n(static_cast<const char*>(from), num_bytes, bytes_ + num_bytes_);
  num_bytes_ += num_bytes;
  return true;
}

void add_traits(py::module_& module) {
  // They return no function of pybind11, whose call would take as long as this one.
  static PyMethodDef methods[]{
      {"traits", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&traits)), METH_FASTCALL, nullptr},
      {"row_traits", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&row_traits)), METH_FASTCALL, nullptr},
  };
  for (PyMethodDef& method : methods) {
    module.def((std::string(method.ml_name) + "_or").c_str(),
               [&method](const py::object& of_any) {
                 return py::reinterpret_steal<py::object>(PyCFunction_New(&method, of_any.ptr()));
               },
               py::arg("of_any"));
  }
}

}  // namespace hybrid_ep::bindings
