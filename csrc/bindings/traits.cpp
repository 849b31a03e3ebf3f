// What checks of a call's arguments read, in one call. Python would take as long for each attribute as this does for a
// tensor.
#include "bindings/traits.h"

#include <algorithm>
#include <string>

#include "bindings/bindings.h"
#include "calls/tensor_arg.h"

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

// Bytes for all arguments but the first `num_skipped`; if one cannot be described, what `of_any` returns for them all.
PyObject* traits_of(PyObject* of_any, PyObject* const* objects, Py_ssize_t num_objects, Py_ssize_t num_skipped,
                    std::optional<int64_t> num_rows) {
  TraitsOfArguments found;
  found.set_num_rows(num_rows);
  bool all = !calls::is_traced();
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
  return add_tensor(object);
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
  const calls::TensorArg argument(object);
  if (!argument.is_of_torch() || !argument.is_described()) return false;
  const dlpack::Tensor& tensor = argument.described();
  if (tensor.num_dims > kMaxDims) return false;
  const bool is_integer = tensor.dtype.code == dlpack::kInt || tensor.dtype.code == dlpack::kUInt;
  const bool keeps_grad = !is_integer && calls::keeps_grad(object);  // asking costs as much as the rest
  const auto num_dims = static_cast<int16_t>(tensor.num_dims);
  const Facts facts{tensor.device, tensor.dtype, num_dims, argument.is_contiguous(), keeps_grad};
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
