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

// torch's dtype of this name.
inline pybind11::object dtype_of(const char* name) { return pybind11::module_::import("torch").attr(name); }

// The dtypes of results.
enum class Dtype { kBfloat16, kFloat8, kFloat32, kInt8, kUint8, kInt32 };

// Where tensors are made.
class TensorDevice {
 public:
  // `by_python`: as where torch lacks the interface; for tests.
  explicit TensorDevice(pybind11::object device, bool by_python = false);

  friend pybind11::object new_tensor(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                                     Dtype dtype, const TensorDevice& device, uintptr_t* address);

 private:
  pybind11::object device_;
  int32_t type_ = -1, index_ = -1;  // as torch's interface numbers them; a type of −1: by Python
};

// As torch.empty_strided. Writes the address, too.
pybind11::object new_tensor(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Dtype dtype,
                            const TensorDevice& device, uintptr_t* address);

// Makes tensors of one shape, dtype and device.
class NewTensor {
 public:
  // `by_python`: as where torch lacks the interface; for tests.
  NewTensor(std::vector<int64_t> shape, std::vector<int64_t> strides, const pybind11::object& dtype,
            const pybind11::object& device, bool by_python);

  // Writes the address, too.
  pybind11::object make(uintptr_t* address) const { return make(shape_, address); }
  // The same with another first size.
  pybind11::object make_rows(int64_t num_rows, uintptr_t* address) const;
  // nullptr: torch cannot make one in this way, or not now.
  std::unique_ptr<OwnedTensor> make_owned() const { return make_owned(shape_); }

 private:
  pybind11::object make(const std::vector<int64_t>& shape, uintptr_t* address) const;
  std::unique_ptr<OwnedTensor> make_owned(const std::vector<int64_t>& shape) const;

  std::vector<int64_t> shape_, strides_;
  int32_t dtype_ = 0, device_type_ = 0, device_index_ = 0;
  pybind11::object empty_strided_;  // of Python, with dtype and device
};

}  // namespace hybrid_ep::bindings
