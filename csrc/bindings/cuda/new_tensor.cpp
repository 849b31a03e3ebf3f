#include "bindings/cuda/new_tensor.h"

#include <dlfcn.h>
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"

namespace hybrid_ep::bindings {
namespace {

namespace py = pybind11;

constexpr char kWrap[] = "_Z16THPVariable_WrapRKN2at10TensorBaseE";

// The library of torch's Python module, which has loaded all others; nullptr: it has another name.
void* torch_library() {
  static void* const library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
  return library;
}

template <typename Function>
bool find(const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(torch_library(), name));
  return *function != nullptr;
}

std::optional<TorchInterface> find_interface() {
  TorchInterface found{};
  if (torch_library() == nullptr) return std::nullopt;
  const bool has_all = find("aoti_torch_empty_strided", &found.empty_strided) &&
                       find("aoti_torch__reinterpret_tensor", &found.reinterpret) &&
                       find("aoti_torch_get_data_ptr", &found.data_ptr) &&
                       find("aoti_torch_delete_tensor_object", &found.destroy) && find(kWrap, &found.wrap);
  return has_all ? std::optional(found) : std::nullopt;
}

// torch's number of a dtype or a kind of devices, as its names have it; nullopt: torch does not know it.
std::optional<int32_t> number_of(const std::string& function) {
  int32_t (*number)() = nullptr;
  if (torch_library() == nullptr || !find(function.c_str(), &number)) return std::nullopt;
  return number();
}

constexpr std::array kDtypes{"bfloat16", "float8_e4m3fn", "float32", "int8", "uint8", "int32", "bool"};  // by Dtype

// torch's number of a dtype; −1: torch does not know it.
int32_t number_of(Dtype dtype) {
  static const auto numbers = [] {
    std::array<int32_t, kDtypes.size()> found{};
    for (size_t i = 0; i < found.size(); ++i) {
      found[i] = number_of(std::string("aoti_torch_dtype_") + kDtypes[i]).value_or(-1);
    }
    return found;
  }();
  return numbers[static_cast<size_t>(dtype)];
}

}  // namespace

const TorchInterface* torch_interface() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<std::optional<TorchInterface>> stored;
  const auto& found = stored.call_once_and_store_result(&find_interface).get_stored();
  return found ? &*found : nullptr;
}

uintptr_t OwnedTensor::address() const {
  void* address = nullptr;
  if (torch_interface()->data_ptr(handle_, &address) != 0) throw std::runtime_error("aoti_torch_get_data_ptr failed");
  return reinterpret_cast<uintptr_t>(address);
}

py::object OwnedTensor::as_python() const {
  PyObject* const tensor = torch_interface()->wrap(handle_);
  if (tensor == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(tensor);
}

py::object OwnedTensor::part(int64_t offset, int64_t size) const {
  const int64_t stride = 1;
  TorchInterface::Handle view = nullptr;
  if (torch_interface()->reinterpret(handle_, 1, &size, &stride, offset, &view) != 0) {
    throw std::runtime_error("aoti_torch__reinterpret_tensor failed");
  }
  return OwnedTensor(view).as_python();
}

TensorDevice::TensorDevice(py::object device, bool by_python) : device_(std::move(device)) {
  if (by_python || torch_interface() == nullptr) return;
  type_ = number_of("aoti_torch_device_type_" + device_.attr("type").cast<std::string>()).value_or(-1);
  index_ = device_.attr("index").cast<std::optional<int>>().value_or(-1);
}

TorchInterface::Handle TensorDevice::empty(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                                           Dtype dtype) const {
  TorchInterface::Handle handle = nullptr;
  const bool is_made = type_ >= 0 && number_of(dtype) >= 0 &&
                       torch_interface()->empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                        strides.data(), number_of(dtype), type_, index_, &handle) == 0;
  return is_made ? handle : nullptr;
}

std::unique_ptr<OwnedTensor> TensorDevice::new_owned(int64_t size, Dtype dtype) const {
  const TorchInterface::Handle handle = empty({size}, {1}, dtype);
  return handle == nullptr ? nullptr : std::make_unique<OwnedTensor>(handle);
}

py::object TensorDevice::new_tensor(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Dtype dtype,
                                    uintptr_t* address) const {
  if (const TorchInterface::Handle handle = empty(shape, strides, dtype); handle != nullptr) {
    const OwnedTensor owned(handle);
    *address = owned.address();
    return owned.as_python();
  }
  const py::module_ torch = py::module_::import("torch");
  const py::object tensor =  // raises what torch raises, if there is no memory
      torch.attr("empty_strided")(shape, strides, py::arg("dtype") = torch.attr(kDtypes[static_cast<size_t>(dtype)]),
                                  py::arg("device") = device_);
  *address = address_of(tensor);
  return tensor;
}

}  // namespace hybrid_ep::bindings
