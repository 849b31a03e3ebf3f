// Functions of Python that are called in each repeated call. Those of pybind11 take longer than what they do.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <stdexcept>
#include <string>

namespace hybrid_ep::bindings {

// The arguments of a call, all by position.
using FastArguments = PyObject* const*;

template <typename T>
struct MethodOf;
template <typename T>
struct MethodOf<pybind11::object (T::*)(FastArguments)> {
  using Class = T;
};
template <typename T>
struct MethodOf<pybind11::object (T::*)(FastArguments) const> {
  using Class = T;
};

// A function of Python that calls a method of `self`. It raises what a function of pybind11 raises.
template <auto kMethod, int kNumArguments>
pybind11::object fast_call(const pybind11::object& self) {
  namespace py = pybind11;
  const auto call = +[](PyObject* of, FastArguments arguments, Py_ssize_t num) -> PyObject* {
    try {
      if (num != kNumArguments) {
        throw py::type_error("arguments are " + std::to_string(num) + "; allowed: " + std::to_string(kNumArguments));
      }
      auto& object = py::handle(of).cast<typename MethodOf<decltype(kMethod)>::Class&>();
      return (object.*kMethod)(arguments).release().ptr();
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (...) {
      // A function of pybind11 knows which error of Python this is.
      try {
        py::cpp_function([thrown = std::current_exception()] { std::rethrow_exception(thrown); })();
      } catch (py::error_already_set& error) {
        error.restore();
      }
    }
    return nullptr;
  };
  static PyMethodDef definition{"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                                METH_FASTCALL, nullptr};
  PyObject* const made = PyCFunction_New(&definition, self.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace hybrid_ep::bindings
