// Tuples of Python's NamedTuple classes, which calls make and read by position.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace hybrid_ep::bindings {

inline pybind11::object field(const pybind11::object& object) { return object; }
template <typename Integer>
pybind11::object field(Integer value) {
  return pybind11::int_(value);
}

// A tuple of a class. Calling the class would take longer than the rest of a call's bookkeeping.
template <typename... Fields>
pybind11::object make_named(const pybind11::object& named, const Fields&... fields) {
  auto* const type = reinterpret_cast<PyTypeObject*>(named.ptr());
  std::array<pybind11::object, sizeof...(Fields)> values{field(fields)...};
  auto made = pybind11::reinterpret_steal<pybind11::object>(type->tp_alloc(type, values.size()));
  if (!made) throw pybind11::error_already_set();
  for (size_t i = 0; i < values.size(); ++i) PyTuple_SET_ITEM(made.ptr(), i, values[i].release().ptr());
  return made;
}

// Throws if the fields of a class have other names or another order.
inline void require_fields(const pybind11::object& named, std::initializer_list<const char*> names) {
  const pybind11::tuple found = named.attr("_fields");
  bool are_same = found.size() == names.size();
  size_t i = 0;
  for (const char* name : names) are_same = are_same && found[i++].cast<std::string>() == name;
  if (are_same) return;
  throw std::invalid_argument("the fields of " + named.attr("__name__").cast<std::string>() + " are " +
                              pybind11::repr(found).cast<std::string>() + ", and C++ takes them for others");
}

// Of the classes in hybrid_ep/engine/calls.py and hybrid_ep/engine/cuda/route.py.
inline void require_route(const pybind11::object& named) {
  require_fields(named, {"chunk", "address", "counts_at", "num_recv", "max_recv", "max_sent", "num_sent_away",
                         "num_from_away", "num_records", "number", "stream"});
}
inline void require_dispatch_handle(const pybind11::object& named) {
  require_fields(named, {"rank_prefix_matrix", "num_tokens", "num_recv", "num_experts", "num_topk", "grid", "state"});
}
inline void require_permute_handle(const pybind11::object& named) {
  require_fields(named, {"dispatch", "num_tokens_per_expert", "num_permuted", "pad_multiple", "state", "overflow"});
}

}  // namespace hybrid_ep::bindings
