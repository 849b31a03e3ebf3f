#include "calls/tensor_arg.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <array>

#include "bindings/exchange_api.h"

namespace hybrid_ep::calls {
namespace {

namespace py = pybind11;

constexpr int kMaxCuda = 16;  // GPUs of a host; torch names the devices of others

struct NamedDtype {
  const char* name;
  dlpack::DataType type;
};
// What tensors of our calls hold; torch names the dtypes of others.
constexpr NamedDtype kDtypes[]{
    {"bfloat16", {dlpack::kBfloat, 16, 1}},
    {"int64", {dlpack::kInt, 64, 1}},
    {"float32", {dlpack::kFloat, 32, 1}},
    {"int32", {dlpack::kInt, 32, 1}},
    {"float8_e4m3fn", {dlpack::kFloat8E4M3Fn, 8, 1}},
    {"uint8", {dlpack::kUInt, 8, 1}},
    {"bool", {dlpack::kBool, 8, 1}},
    {"int8", {dlpack::kInt, 8, 1}},
    {"float16", {dlpack::kFloat, 16, 1}},
    {"float64", {dlpack::kFloat, 64, 1}},
};

bool is_true(const py::object& function) { return owned(PyObject_CallNoArgs(function.ptr())).ptr() == Py_True; }

// What is read of torch, looked up once. It is never destroyed: static variables end after the interpreter.
struct Torch {
  static const Torch& get() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> stored;
    return stored.call_once_and_store_result([] { return Torch(); }).get_stored();
  }

  Torch() {
    describe = exchange_api().describe;
    for (size_t i = 0; i < dtypes.size(); ++i) dtypes[i] = module.attr(kDtypes[i].name);
    for (int i = 0; i < kMaxCuda; ++i) cuda[i] = module.attr("device")("cuda", i);
  }

  py::module_ module = py::module_::import("torch"), native = py::module_::import("torch._C");
  py::object tensor_type = module.attr("Tensor"), parameter_type = module.attr("nn").attr("Parameter");
  py::object fake_type = py::module_::import("torch._subclasses.fake_tensor").attr("FakeTensor");
  py::object functional_type = py::module_::import("torch._subclasses.functional_tensor").attr("FunctionalTensor");
  int (*describe)(void*, dlpack::Tensor*);

  py::object strided = module.attr("strided"), cpu = module.attr("device")("cpu");
  std::array<py::object, kMaxCuda> cuda;
  std::array<py::object, std::size(kDtypes)> dtypes;

  py::object is_neg = tensor_type.attr("is_neg");  // a method, which takes the tensor
  py::str requires_grad = "requires_grad";
  py::object is_grad_enabled = module.attr("is_grad_enabled");
  py::object is_mode_enabled = native.attr("_is_torch_function_mode_enabled");
  py::object no_modes_type = native.attr("DisableTorchFunction");
  py::object is_tracing = native.attr("_is_tracing");
  py::object num_modes = native.attr("_len_torch_dispatch_stack"), mode_of = native.attr("_get_dispatch_mode");
  py::tuple tracers = native.attr("_TorchDispatchModeKey").attr("__members__").attr("values")();
  py::object transform = native.attr("_functorch").attr("peek_interpreter_stack");
};

}  // namespace

PlainTensors::PlainTensors() {
  const Torch& torch = Torch::get();
  if (!is_true(torch.is_mode_enabled)) return;
  disabled_ = torch.no_modes_type();
  disabled_.attr("__enter__")();
}

PlainTensors::~PlainTensors() {
  if (!disabled_) return;
  const py::error_scope kept;
  disabled_.attr("__exit__")(py::none(), py::none(), py::none());
}

bool is_recorded() {
  const Torch& torch = Torch::get();
  if (is_true(torch.is_tracing)) return true;
  // Any mode of torch.utils is on this stack, and few are a tracer's.
  if (PyObject_Not(owned(PyObject_CallNoArgs(torch.num_modes.ptr())).ptr()) == 1) return false;
  return std::any_of(torch.tracers.begin(), torch.tracers.end(),
                     [&](py::handle tracer) { return !torch.mode_of(tracer).is_none(); });
}

bool is_transformed() { return !owned(PyObject_CallNoArgs(Torch::get().transform.ptr())).is_none(); }

bool keeps_grad(PyObject* tensor) {
  const PlainTensors plain;
  const Torch& torch = Torch::get();
  const py::object requires_grad = owned(PyObject_GetAttr(tensor, torch.requires_grad.ptr()));
  return requires_grad.ptr() == Py_True && is_true(torch.is_grad_enabled);
}

TensorArg::TensorArg(PyObject* object) : object_(object), tensor_{} {
  const Torch& torch = Torch::get();
  const auto* type = reinterpret_cast<const PyObject*>(Py_TYPE(object));
  class_ = type == torch.tensor_type.ptr()      ? Class::kTensor
           : type == torch.parameter_type.ptr() ? Class::kParameter
                                                : Class::kOther;
  is_described_ = is_plain() && torch.describe(object, &tensor_) == 0;
  if (!is_described_) PyErr_Clear();
}

bool TensorArg::is_of_tracer() const {
  const Torch& torch = Torch::get();
  const auto* type = reinterpret_cast<const PyObject*>(Py_TYPE(object_));
  return type == torch.fake_type.ptr() || type == torch.functional_type.ptr();
}

bool TensorArg::is_tensor() const { return is_plain() || py::isinstance(object_, Torch::get().tensor_type); }

py::object TensorArg::attribute(const char* name) const {
  const PlainTensors plain;
  return owned(PyObject_GetAttrString(object_, name));
}

py::object TensorArg::result(const char* name) const {
  const PlainTensors plain;
  return owned(PyObject_CallMethod(object_, name, nullptr));
}

py::object TensorArg::dtype() const {
  if (is_described_) {
    const dlpack::DataType& type = tensor_.dtype;
    for (size_t i = 0; i < std::size(kDtypes); ++i) {
      const dlpack::DataType& other = kDtypes[i].type;
      if (type.code == other.code && type.bits == other.bits && type.lanes == other.lanes) {
        return Torch::get().dtypes[i];
      }
    }
  }
  return attribute("dtype");
}

py::object TensorArg::device() const {
  if (is_described_) {
    const auto [type, id] = tensor_.device;
    if (type == dlpack::kCpu) return Torch::get().cpu;
    if (type == dlpack::kCuda && id >= 0 && id < kMaxCuda) return Torch::get().cuda[id];
  }
  return attribute("device");
}

int64_t TensorArg::size(int dimension) const {
  if (is_described_) return tensor_.shape[dimension];
  return attribute("shape")[py::int_(dimension)].cast<int64_t>();
}

bool TensorArg::has_shape(PyObject* sizes) const {
  const py::object shape = is_described_ ? py::object() : attribute("shape");
  const Py_ssize_t num_dims = is_described_ ? tensor_.num_dims : PyObject_Length(shape.ptr());
  const py::object wanted = owned(PySequence_Fast(sizes, "shape is no sequence"));
  if (num_dims < 0) throw py::error_already_set();
  if (PySequence_Fast_GET_SIZE(wanted.ptr()) != num_dims) return false;
  for (Py_ssize_t i = 0; i < num_dims; ++i) {
    PyObject* const size = PySequence_Fast_GET_ITEM(wanted.ptr(), i);
    if (size == Py_None) continue;
    if (is_described_ && PyLong_CheckExact(size)) {
      int overflow = 0;
      const int64_t value = PyLong_AsLongLongAndOverflow(size, &overflow);
      if (overflow != 0 || value != tensor_.shape[i]) return false;
      continue;
    }
    const py::object own = is_described_ ? py::int_(tensor_.shape[i]) : owned(PySequence_GetItem(shape.ptr(), i));
    const int differs = PyObject_RichCompareBool(size, own.ptr(), Py_NE);
    if (differs < 0) throw py::error_already_set();
    if (differs == 1) return false;
  }
  return true;
}

bool TensorArg::is_strided() const { return is_described_ || attribute("layout").is(Torch::get().strided); }

bool TensorArg::is_contiguous() const {
  if (!is_described_) return result("is_contiguous").ptr() == Py_True;
  if (tensor_.strides == nullptr) return true;
  bool is_packed = true;
  int64_t stride = 1;
  for (int i = tensor_.num_dims - 1; i >= 0; --i) {
    if (tensor_.shape[i] == 0) return true;
    if (tensor_.shape[i] == 1) continue;
    is_packed &= tensor_.strides[i] == stride;
    stride *= tensor_.shape[i];
  }
  return is_packed;
}

bool TensorArg::is_lazy() const {
  // Zeros that are yet to be computed have no memory, as tensors without elements. Negatives are the imaginary parts of
  // conjugates, and so of IEEE's dtypes.
  const bool may_be_zero = !is_described_ || tensor_.data == nullptr;
  if (may_be_zero && result("_is_zerotensor").ptr() == Py_True) return true;
  if (is_described_ && tensor_.dtype.code != dlpack::kFloat) return false;
  const PlainTensors plain;
  return owned(PyObject_CallOneArg(Torch::get().is_neg.ptr(), object_)).ptr() == Py_True;
}

}  // namespace hybrid_ep::calls
