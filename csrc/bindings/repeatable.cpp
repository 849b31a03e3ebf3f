// Methods whose repeated calls enter no function of Python. At the begin of a call the host's caches are cold, and the
// frames and attributes of a method in Python take longer than the launch of a kernel.
//
//     method(self, …) ─► traits of all arguments ─► a Repeat in self's memo ─► its `call` ─► result
//                                  └─ none, or `call` returns None ─► the method in Python
//
// hybrid_ep/core/repeatable.py says what a Repeat is, and makes these methods.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/traits.h"
#include "calls/tensor_arg.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

constexpr size_t kMaxParameters = 24;  // with self

// What a method takes, and what of it decides whether a call is a repetition.
struct Parameter {
  py::object name;       // interned
  py::object value;      // where a call gives none; null: it must give one
  bool is_read = false;  // it is an object of which attributes are read, or None
  std::vector<py::object> attributes;
  bool has_rows = false;  // its first size may be the number of rows
};

using Arguments = std::array<PyObject*, kMaxParameters>;

class Method {
 public:
  // The arguments of `repeatable_method` in hybrid_ep/_C.pyi.
  Method(py::object function, const py::tuple& names, size_t num_positional, const py::tuple& values,
         const py::dict& reads, const std::optional<py::tuple>& rows, py::object first_type)
      : function_(std::move(function)), first_type_(std::move(first_type)), num_positional_(num_positional) {
    if (num_positional == 0 || names.size() > kMaxParameters) throw py::value_error("too many parameters");
    const size_t num_required = names.size() - values.size();
    for (size_t i = 0; i < names.size(); ++i) {
      Parameter parameter{interned(names[i]), {}, false, {}, false};
      if (i >= num_required) parameter.value = values[i - num_required];
      if (reads.contains(parameter.name)) {
        parameter.is_read = true;
        for (const py::handle name : reads[parameter.name]) parameter.attributes.push_back(interned(name));
      }
      parameters_.push_back(std::move(parameter));
    }
    if (!rows) return;
    rows_ = {index_of((*rows)[0]), interned((*rows)[1])};
    for (size_t i = 2; i < rows->size(); ++i) parameters_[index_of((*rows)[i])].has_rows = true;
  }

  // As a function of Python that takes `args` is called.
  py::object call(PyObject* const* args, size_t num_args, PyObject* keywords) const {
    const calls::PlainTensors plain;
    Arguments arguments;
    py::object key, memo;
    if (!calls::is_traced() && bind(args, PyVectorcall_NARGS(num_args), keywords, &arguments)) {
      key = key_of(arguments);
      if (key) memo = memo_of(arguments[0]);
      PyObject* const repeat = memo ? PyDict_GetItemWithError(memo.ptr(), key.ptr()) : nullptr;
      if (repeat != nullptr) {
        py::object result = make(py::reinterpret_borrow<py::tuple>(repeat), arguments);
        if (result) return result;
      }
      if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
    py::object result = calls::owned(PyObject_Vectorcall(function_.ptr(), args, num_args, keywords));
    if (!Py_IS_TYPE(result.ptr(), reinterpret_cast<PyTypeObject*>(first_type_.ptr()))) return result;
    const auto first = py::reinterpret_steal<py::tuple>(result.release());
    if (memo) memo.attr("add")(key, prepared(first[1]));
    return first[0];
  }

 private:
  static py::object interned(py::handle name) {
    PyObject* text = py::str(name).release().ptr();
    PyUnicode_InternInPlace(&text);
    return py::reinterpret_steal<py::object>(text);
  }
  int index_of(py::handle name) const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].name.equal(name)) return static_cast<int>(i);
    }
    throw py::value_error("no parameter has this name");
  }

  // Finds the argument of each parameter. Returns false where the call is wrong; Python then raises its error.
  bool bind(PyObject* const* args, size_t num_positional, PyObject* keywords, Arguments* found) const {
    const size_t num = parameters_.size();
    if (num_positional == 0 || num_positional > num_positional_) return false;
    std::copy_n(args, num_positional, found->begin());
    std::fill(found->begin() + num_positional, found->begin() + num, nullptr);
    const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < num_keywords; ++i) {
      const int idx = find(py::handle(PyTuple_GET_ITEM(keywords, i)));
      if (idx < 0 || (*found)[idx] != nullptr) return false;
      (*found)[idx] = args[num_positional + i];
    }
    for (size_t i = num_positional; i < num; ++i) {
      if ((*found)[i] == nullptr) (*found)[i] = parameters_[i].value.ptr();
      if ((*found)[i] == nullptr) return false;
    }
    return true;
  }
  int find(py::handle name) const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].name.is(name)) return static_cast<int>(i);
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].name.equal(name)) return static_cast<int>(i);
    }
    return -1;
  }

  // The method and the traits of its arguments; null if one cannot be described.
  py::object key_of(const Arguments& arguments) const {
    TraitsOfArguments traits;
    const std::optional<int64_t> num_rows = num_rows_of(arguments);
    if (!traits.add_identity(this)) return {};
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = parameters_[i];
      const bool is_read = parameter.is_read && arguments[i] != Py_None;
      if (i == 0 && !is_read) continue;  // the memo is of `self`
      traits.set_num_rows(parameter.has_rows ? num_rows : std::nullopt);
      if (!(is_read ? traits.add(arguments[i], parameter.attributes) : traits.add(arguments[i]))) return {};
    }
    return calls::owned(traits.as_bytes());
  }
  std::optional<int64_t> num_rows_of(const Arguments& arguments) const {
    if (!rows_ || arguments[rows_->first] == Py_None) return std::nullopt;
    const auto rows = py::reinterpret_steal<py::object>(PyObject_GetAttr(arguments[rows_->first], rows_->second.ptr()));
    const int64_t num_rows = rows && PyLong_CheckExact(rows.ptr()) ? PyLong_AsLongLong(rows.ptr()) : -1;
    PyErr_Clear();
    return num_rows < 0 ? std::nullopt : std::optional(num_rows);
  }

  // The memo of an object; null if it has none, or may not be used.
  static py::object memo_of(PyObject* self) {
    static PyObject* const name = PyUnicode_InternFromString("_repeats");
    static PyObject* const of_memo = PyUnicode_InternFromString("is_usable");
    auto memo = py::reinterpret_steal<py::object>(PyObject_GetAttr(self, name));
    if (!memo) {
      PyErr_Clear();
      return memo;
    }
    const py::object is_usable = calls::owned(PyObject_GetAttr(memo.ptr(), of_memo));
    if (!is_usable.is_none() && calls::owned(PyObject_CallNoArgs(is_usable.ptr())).ptr() != Py_True) return {};
    return memo;
  }

  // A Repeat whose parameters are numbers.
  py::tuple prepared(const py::tuple& repeat) const {
    const py::tuple takes = repeat[1];
    py::tuple by_number(takes.size());
    for (size_t i = 0; i < takes.size(); ++i) {
      const py::object taken = takes[i];
      if (py::isinstance<py::tuple>(taken)) {
        const auto item = py::reinterpret_borrow<py::tuple>(taken);
        by_number[i] = py::make_tuple(index_of(item[0]), item[1]);
      } else if (taken.is_none()) {
        by_number[i] = taken;
      } else {
        by_number[i] = py::int_(index_of(taken));
      }
    }
    return py::make_tuple(repeat[0], by_number, repeat[2]);
  }

  // Makes a repeated call. Returns null if the call has not been made.
  static py::object make(const py::tuple& repeat, const Arguments& arguments) {
    PyObject* const takes = PyTuple_GET_ITEM(repeat.ptr(), 1);
    const auto num_taken = static_cast<size_t>(PyTuple_GET_SIZE(takes));
    Arguments taken;
    std::array<py::object, kMaxParameters> owned;
    if (num_taken > taken.size()) throw py::value_error("a Repeat takes too much");
    for (size_t i = 0; i < num_taken; ++i) taken[i] = take(PyTuple_GET_ITEM(takes, i), arguments, &owned[i]);
    const py::object made =
        calls::owned(PyObject_Vectorcall(PyTuple_GET_ITEM(repeat.ptr(), 0), taken.data(), num_taken, nullptr));
    return made.is_none() ? py::object() : give(PyTuple_GET_ITEM(repeat.ptr(), 2), made);
  }
  // `owned` keeps what nothing else may.
  static PyObject* take(PyObject* what, const Arguments& arguments, py::object* owned) {
    if (what == Py_None) return what;
    if (PyLong_CheckExact(what)) return arguments[PyLong_AsLong(what)];
    PyObject* const argument = arguments[PyLong_AsLong(PyTuple_GET_ITEM(what, 0))];
    PyObject* const part = PyTuple_GET_ITEM(what, 1);
    if (PyLong_CheckExact(part)) return PyTuple_GetItem(argument, PyLong_AsLong(part));
    *owned = calls::owned(PyObject_GetAttr(argument, part));
    return owned->ptr();
  }
  static py::object give(PyObject* what, const py::object& made) {
    if (PyLong_CheckExact(what)) {
      return py::reinterpret_borrow<py::object>(PyTuple_GetItem(made.ptr(), PyLong_AsLong(what)));
    }
    if (PyType_Check(what)) {
      static PyObject* const nothing = PyTuple_New(0);
      return calls::owned(PyBaseObject_Type.tp_new(reinterpret_cast<PyTypeObject*>(what), nothing, nullptr));
    }
    if (!PyTuple_CheckExact(what)) return py::reinterpret_borrow<py::object>(what);
    const Py_ssize_t num = PyTuple_GET_SIZE(what);
    py::object result = calls::owned(PyTuple_New(num));
    for (Py_ssize_t i = 0; i < num; ++i) {
      PyTuple_SET_ITEM(result.ptr(), i, give(PyTuple_GET_ITEM(what, i), made).release().ptr());
    }
    return result;
  }

  py::object function_, first_type_;
  size_t num_positional_;
  std::vector<Parameter> parameters_;
  std::optional<std::pair<int, py::object>> rows_;
};

// The type of Python. Its objects live as long as the class that has the method, so the collector of garbage need not
// know them.
struct MethodObject {
  PyObject ob_base;
  vectorcallfunc vectorcall;
  PyObject* dict;
  Method* method;
};

PyObject* call_method(PyObject* self, PyObject* const* args, size_t num_args, PyObject* keywords) try {
  return reinterpret_cast<MethodObject*>(self)->method->call(args, num_args, keywords).release().ptr();
} catch (py::error_already_set& error) {
  error.restore();
  return nullptr;
} catch (const std::exception& error) {
  PyErr_SetString(PyExc_RuntimeError, error.what());
  return nullptr;
}

PyObject* bind_method(PyObject* self, PyObject* object, PyObject*) {
  if (object == nullptr || object == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, object);
}

void free_method(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto* const object = reinterpret_cast<MethodObject*>(self);
  delete object->method;
  Py_XDECREF(object->dict);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* method_type() {
  static PyMemberDef members[]{
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(MethodObject, vectorcall), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(MethodObject, dict), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef properties[]{
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[]{
      {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {Py_tp_descr_get, reinterpret_cast<void*>(&bind_method)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&free_method)},
      {Py_tp_members, members},
      {Py_tp_getset, properties},
      {0, nullptr},
  };
  static PyType_Spec spec{"hybrid_ep._C.RepeatableMethod", sizeof(MethodObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
  static PyObject* const type = calls::owned(PyType_FromSpec(&spec)).release().ptr();
  return type;
}

}  // namespace

void add_repeatable(py::module_& module) {
  module.def(
      "repeatable_method",
      [](py::object function, const py::tuple& names, size_t num_positional, const py::tuple& values,
         const py::dict& reads, const std::optional<py::tuple>& rows, py::object first_type) {
        auto method = std::make_unique<Method>(std::move(function), names, num_positional, values, reads, rows,
                                               std::move(first_type));
        auto* const type = reinterpret_cast<PyTypeObject*>(method_type());
        py::object made = calls::owned(type->tp_alloc(type, 0));
        auto* const object = reinterpret_cast<MethodObject*>(made.ptr());
        object->vectorcall = &call_method;
        object->method = method.release();
        return made;
      },
      py::arg("function"), py::arg("names"), py::arg("num_positional"), py::arg("values"), py::arg("reads"),
      py::arg("rows"), py::arg("first_type"));
}

}  // namespace hybrid_ep::bindings
