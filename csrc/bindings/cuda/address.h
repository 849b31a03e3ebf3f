// An argument that a kernel takes as an address.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace hybrid_ep::bindings {

// The address of a tensor. An integer is an address, too, and None is nullptr.
struct Address {
  uintptr_t value;
  operator uintptr_t() const { return value; }
};

// Throws what Python raises for anything else.
inline uintptr_t address_of(pybind11::handle source) {
  namespace py = pybind11;
  if (source.is_none()) return 0;
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  const py::object address = PyLong_Check(source.ptr())
                                 ? py::reinterpret_borrow<py::object>(source)
                                 : py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(source.ptr(), data_ptr));
  const size_t value = address ? PyLong_AsSize_t(address.ptr()) : 0;
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

}  // namespace hybrid_ep::bindings

template <>
struct pybind11::detail::type_caster<hybrid_ep::bindings::Address> {
  PYBIND11_TYPE_CASTER(hybrid_ep::bindings::Address, const_name("torch.Tensor | int | None"));

  bool load(handle source, bool) {
    value.value = hybrid_ep::bindings::address_of(source);
    return true;
  }
};
