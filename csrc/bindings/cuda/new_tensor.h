// New tensors of torch's allocator, made without a call of Python: at the begin of a call, when the host's caches are
// cold, torch.empty takes about as long as the launch of a kernel.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace hybrid_ep::bindings {

// The functions of torch's stable C interface that are used here, and its conversion to Python, by name. This module is
// not linked to torch, so that one build serves several versions.
struct TorchInterface {
  // A tensor handle is a pointer to an at::Tensor. Each returns 0, or has failed.
  using Handle = void*;
  int32_t (*empty_strided)(int64_t num_dims, const int64_t* shape, const int64_t* strides, int32_t dtype,
                           int32_t device_type, int32_t device_index, Handle* tensor);
  int32_t (*reinterpret)(Handle tensor, int64_t num_dims, const int64_t* shape, const int64_t* strides, int64_t offset,
                         Handle* view);
  int32_t (*data_ptr)(Handle tensor, void** address);
  int32_t (*destroy)(Handle tensor);
  PyObject* (*wrap)(Handle tensor);  // a new reference; THPVariable_Wrap(const at::TensorBase&)
};

// nullptr where torch lacks one of them.
const TorchInterface* torch_interface();

// A tensor that Python may not know yet.
class OwnedTensor {
 public:
  explicit OwnedTensor(TorchInterface::Handle handle) : handle_(handle) {}
  ~OwnedTensor() { torch_interface()->destroy(handle_); }
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;

  uintptr_t address() const;
  pybind11::object as_python() const;
  // `size` elements from `offset` on, as a tensor of one dimension.
  pybind11::object part(int64_t offset, int64_t size) const;

 private:
  TorchInterface::Handle handle_;
};

// The dtypes of results.
enum class Dtype { kBfloat16, kFloat8, kFloat32, kInt8, kUint8, kInt32, kBool };

// Where tensors are made.
class TensorDevice {
 public:
  // `by_python`: as where torch lacks the interface; for tests.
  explicit TensorDevice(pybind11::object device, bool by_python = false);

  // Makes a contiguous tensor of one dimension. nullptr: torch cannot make one in this way, or not now.
  std::unique_ptr<OwnedTensor> new_owned(int64_t size, Dtype dtype) const;
  // Makes a tensor as torch.empty_strided does, and writes its address, too.
  pybind11::object new_tensor(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Dtype dtype,
                              uintptr_t* address) const;

 private:
  TorchInterface::Handle empty(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                               Dtype dtype) const;

  pybind11::object device_;
  int32_t type_ = -1, index_ = -1;  // as torch's interface numbers them; a type of −1: by Python
};

}  // namespace hybrid_ep::bindings
