// What checks of a call's arguments read, as bytes. Equal bytes mean equal traits.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace hybrid_ep::bindings {

class TraitsOfArguments {
 public:
  // From now on a first size of a tensor that equals it need not be the same.
  void set_num_rows(std::optional<int64_t> num_rows) { num_rows_ = num_rows; }

  // Adds a tensor, None, a bool, an int of 64 bits, or a tuple of these. Returns false, without a Python error, for
  // anything else, for tensors of other classes and without memory, and if there are too many.
  bool add(PyObject* object);
  // Adds the class of an object, and what its attributes are: ints, or else which object. False as above.
  bool add(PyObject* object, const std::vector<pybind11::object>& attributes);
  // Adds which object it is.
  bool add_identity(const void* object);

  PyObject* as_bytes() const { return PyBytes_FromStringAndSize(bytes_, num_bytes_); }

 private:
  bool add_kind(uint8_t kind);
  bool add_int(int64_t value);
  bool add_tensor(PyObject* tensor);
  bool append(const void* from, size_t num_bytes);

  std::optional<int64_t> num_rows_;
  size_t num_bytes_ = 0;
  char bytes_[2048];
};

}  // namespace hybrid_ep::bindings
