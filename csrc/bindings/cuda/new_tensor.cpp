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

constexpr std::array kDtypes{"bfloat16", "float8_e4m3fn", "float32", "int8", "uint8", "int32"};  // by Dtype

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

py::object new_tensor(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Dtype dtype,
                      const TensorDevice& device, uintptr_t* address) {
  TorchInterface::Handle handle = nullptr;
  if (device.type_ >= 0 && number_of(dtype) >= 0 &&
      torch_interface()->empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                       number_of(dtype), device.type_, device.index_, &handle) == 0) {
    const OwnedTensor owned(handle);
    *address = owned.address();
    return owned.as_python();
  }
  // Raises what torch raises, if there is no memory.
  const py::object tensor = py::module_::import("torch").attr("empty_strided")(
      shape, strides, py::arg("dtype") = dtype_of(kDtypes[static_cast<size_t>(dtype)]),
      py::arg("device") = device.device_);
  *address = address_of(tensor);
  return tensor;
}

NewTensor::NewTensor(std::vector<int64_t> shape, std::vector<int64_t> strides, const py::object& dtype,
                     const py::object& device, bool by_python)
    : shape_(std::move(shape)),
      strides_(std::move(strides)),
      empty_strided_(py::module_::import("functools")
                         .attr("partial")(py::module_::import("torch").attr("empty_strided"), py::arg("dtype") = dtype,
                                          py::arg("device") = device)) {
  const std::string name = py::str(dtype);  // "torch.int32"
  const auto type = number_of("aoti_torch_dtype_" + name.substr(name.find('.') + 1));
  const auto device_type = number_of("aoti_torch_device_type_" + device.attr("type").cast<std::string>());
  const auto index = device.attr("index").cast<std::optional<int>>();
  if (by_python || torch_interface() == nullptr || !type || !device_type) {
    dtype_ = -1;
    return;
  }
  dtype_ = *type;
  device_type_ = *device_type;
  device_index_ = index.value_or(-1);
}

std::unique_ptr<OwnedTensor> NewTensor::make_owned(const std::vector<int64_t>& shape) const {
  if (dtype_ < 0) return nullptr;
  TorchInterface::Handle handle = nullptr;
  const int32_t status = torch_interface()->empty_strided(
      static_cast<int64_t>(shape.size()), shape.data(), strides_.data(), dtype_, device_type_, device_index_, &handle);
  return status == 0 ? std::make_unique<OwnedTensor>(handle) : nullptr;
}

py::object NewTensor::make_rows(int64_t num_rows, uintptr_t* address) const {
  std::vector<int64_t> shape = shape_;
  shape.front() = num_rows;
  return make(shape, address);
}

py::object NewTensor::make(const std::vector<int64_t>& shape, uintptr_t* address) const {
  if (const auto owned = make_owned(shape)) {
    *address = owned->address();
    return owned->as_python();
  }
  const py::object tensor = empty_strided_(shape, strides_);  // raises what torch raises, if there is no memory
  *address = address_of(tensor);
  return tensor;
}

void add_new_tensor(py::module_& module) {
  py::class_<NewTensor>(module, "NewTensor")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>, const py::object&, const py::object&, bool>(),
           py::arg("shape"), py::arg("strides"), py::arg("dtype"), py::arg("device"), py::arg("by_python") = false)
      .def("__call__", [](const NewTensor& self) {
        uintptr_t address = 0;
        return self.make(&address);
      });
}

}  // namespace hybrid_ep::bindings
