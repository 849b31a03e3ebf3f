// A tensor of torch as an argument of a call. DLPack's exchange API gives its address, dtype, shape, strides and device
// in one step, without a link to torch; what it cannot describe is read through Python's attributes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "bindings/dlpack_abi.h"

namespace hybrid_ep::calls {

// Takes over a new reference that a function of Python's C API returns. Throws Python's error for nullptr.
inline pybind11::object owned(PyObject* object) {
  if (object == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(object);
}

// Inside, tensors are read without torch's function modes, one of which intercepts every attribute of every tensor.
class PlainTensors {
 public:
  PlainTensors();
  ~PlainTensors();
  PlainTensors(const PlainTensors&) = delete;
  PlainTensors& operator=(const PlainTensors&) = delete;

 private:
  pybind11::object disabled_;
};

// Whether torch.jit or a mode of a tracer (FakeTensorMode) records the program, so that what a call returns would
// become a constant.
bool is_recorded();
// Whether a transform of torch.func is under way: tensors of torch's own class may have no memory.
bool is_transformed();
inline bool is_traced() { return is_recorded() || is_transformed(); }
// Whether what is computed from a tensor has a gradient.
bool keeps_grad(PyObject* tensor);

class TensorArg {
 public:
  // Reads an object of any class, which must outlive this.
  explicit TensorArg(PyObject* object);

  PyObject* object() const { return object_; }
  // Whether its class is torch.Tensor or torch.nn.Parameter, and not another one below torch.Tensor.
  bool is_plain() const { return class_ != Class::kOther; }
  // Whether its class is that of a tracer's tensors.
  bool is_of_tracer() const;
  // Whether it is any tensor.
  bool is_tensor() const;

  // Whether the exchange API has described it: it is plain and strided, and has memory.
  bool is_described() const { return is_described_; }
  const dlpack::Tensor& described() const { return tensor_; }

  // The rest is for tensors, and the same whether or not they are described. No function mode intercepts it.
  pybind11::object dtype() const;
  pybind11::object device() const;
  pybind11::object attribute(const char* name) const;
  // What a method without arguments returns.
  pybind11::object result(const char* name) const;
  // The size of a dimension that it has.
  int64_t size(int dimension) const;
  // Whether the shape is `sizes`, a sequence in which None stands for any size.
  bool has_shape(PyObject* sizes) const;
  // Whether it has the layout of most tensors: sizes, strides and one memory.
  bool is_strided() const;
  // Whether its rows are in order and without gaps.
  bool is_contiguous() const;
  // Whether its values are yet to be computed: zeros or negatives of others.
  bool is_lazy() const;

 private:
  enum class Class : uint8_t { kTensor, kParameter, kOther };

  PyObject* object_;
  Class class_;
  bool is_described_;
  dlpack::Tensor tensor_;
};

}  // namespace hybrid_ep::calls
