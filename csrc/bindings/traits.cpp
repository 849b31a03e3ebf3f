// What checks of a call's arguments read, in one call. Python would take as long for each attribute as this does for a
// tensor.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "bindings/exchange_api.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

constexpr int kMaxArguments = 20, kMaxDims = 8;

// What an argument is that is no tensor.
constexpr int16_t kNone = -1, kFalse = -2, kTrue = -3, kInt = -4;
constexpr int64_t kAnyRows = -1;  // in place of a first size that need not be the same

// Of one argument; the sizes of a tensor follow, or the value of an integer. Equal bytes mean equal traits.
struct Traits {
  dlpack::Device device;
  dlpack::DataType dtype;
  int16_t num_dims;  // or one of the kinds below
  bool is_contiguous, keeps_grad;
};
static_assert(sizeof(Traits) == 16, "has no padding");

class TraitsOfArguments {
 public:
  void add(const Traits& traits) { append(&traits, sizeof(traits)); }
  void add(const Traits& traits, const int64_t* sizes, std::optional<int64_t> num_rows) {
    add(traits);
    append(sizes, traits.num_dims * sizeof(int64_t));
    if (num_rows && traits.num_dims > 0 && sizes[0] == *num_rows) {
      std::copy_n(reinterpret_cast<const char*>(&kAnyRows), sizeof(kAnyRows),
                  bytes_ + num_bytes_ - traits.num_dims * sizeof(int64_t));
    }
  }
  void add(int16_t kind) { add(Traits{{}, {}, kind, false, false}); }
  void add_int(int64_t value) {
    add(kInt);
    append(&value, sizeof(value));
  }

  PyObject* as_bytes() const { return PyBytes_FromStringAndSize(bytes_, num_bytes_); }

 private:
  void append(const void* from, size_t num_bytes) {
    std::copy_n(static_cast<const char*>(from), num_bytes, bytes_ + num_bytes_);
    num_bytes_ += num_bytes;
  }

  char bytes_[kMaxArguments * (sizeof(Traits) + kMaxDims * sizeof(int64_t))];
  size_t num_bytes_ = 0;
};

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

class Reader {
 public:
  explicit Reader(const py::module_& torch)
      : tensor_type_(torch.attr("Tensor")), is_grad_enabled_(torch.attr("is_grad_enabled")) {
    const dlpack::ExchangeApi* api = exchange_api();
    if (api != nullptr) describe_ = api->describe;
  }

  // Adds the traits of a tensor, None, a bool or an int of 64 bits. Returns false, without a Python error, for anything
  // else, and for tensors of other classes and without memory. `num_rows`: as `row_traits` takes it.
  bool read(PyObject* object, std::optional<int64_t> num_rows, TraitsOfArguments* found) const {
    if (object == Py_None || object == Py_False || object == Py_True) {
      found->add(object == Py_None ? kNone : object == Py_False ? kFalse : kTrue);
      return true;
    }
    if (PyLong_CheckExact(object)) {
      int overflow = 0;
      const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
      if (overflow == 0) found->add_int(value);
      return overflow == 0;
    }
    if (describe_ == nullptr || !Py_IS_TYPE(object, reinterpret_cast<PyTypeObject*>(tensor_type_.ptr()))) return false;
    dlpack::Tensor tensor{};
    if (describe_(object, &tensor) == 0 && tensor.num_dims <= kMaxDims) {
      const int keeps_grad = has_gradient(object);
      if (keeps_grad >= 0) {
        const auto num_dims = static_cast<int16_t>(tensor.num_dims);
        found->add({tensor.device, tensor.dtype, num_dims, is_contiguous(tensor), keeps_grad == 1}, tensor.shape,
                   num_rows);
        return true;
      }
    }
    PyErr_Clear();
    return false;
  }

 private:
  // Whether what is computed from a tensor has a gradient; −1: a Python error.
  int has_gradient(PyObject* tensor) const {
    const auto requires_grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor, requires_grad_.ptr()));
    if (!requires_grad || requires_grad.ptr() != Py_True) return requires_grad ? 0 : -1;
    const auto is_enabled = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(is_grad_enabled_.ptr()));
    return is_enabled ? is_enabled.ptr() == Py_True : -1;
  }

  py::object tensor_type_, is_grad_enabled_;
  py::str requires_grad_ = "requires_grad";
  int (*describe_)(void*, dlpack::Tensor*) = nullptr;
};

// Bytes for all arguments but the first `num_skipped`; if one cannot be described, what `of_any` returns for them all.
PyObject* traits_of(PyObject* of_any, PyObject* const* objects, Py_ssize_t num_objects, Py_ssize_t num_skipped,
                    std::optional<int64_t> num_rows) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Reader> stored;
  const Reader& reader =
      stored.call_once_and_store_result([] { return Reader(py::module_::import("torch")); }).get_stored();
  TraitsOfArguments found;
  bool all = num_objects - num_skipped <= kMaxArguments;
  for (Py_ssize_t i = num_skipped; all && i < num_objects; ++i) all = reader.read(objects[i], num_rows, &found);
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
