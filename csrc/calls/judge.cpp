#include "calls/judge.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>
#include <array>

#include "calls/tensor_arg.h"
#include "layout/limits.h"

namespace hybrid_ep::calls {
namespace {

namespace py = pybind11;

constexpr int kChannelsPerScale = 128;  // of FP8
constexpr int kScalesPerWord = 4;       // of packed UE8M0

// Throws ConfigError with a message that PyUnicode_FromFormat makes. The format is ASCII; %s takes UTF-8.
template <typename... Values>
[[noreturn]] void refuse(const char* format, Values... values) {
  const py::object message = owned(PyUnicode_FromFormat(format, values...));
  PyErr_SetObject(py::module_::import("hybrid_ep.errors").attr("ConfigError").ptr(), message.ptr());
  throw py::error_already_set();
}

// The parameters of a function: the first `num_positional` may be given by position, all by name.
template <size_t kNum>
class Parameters {
 public:
  Parameters(const char* function, size_t num_positional, size_t num_required, std::array<const char*, kNum> names)
      : function_(function), num_positional_(num_positional), num_required_(num_required) {
    for (size_t i = 0; i < kNum; ++i) names_[i] = owned(PyUnicode_InternFromString(names[i]));
  }

  // Returns the argument of each parameter, nullptr where the call gives none.
  std::array<PyObject*, kNum> bind(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) const {
    std::array<PyObject*, kNum> values{};
    if (static_cast<size_t>(num_args) > num_positional_) {
      wrong("%s() takes %zu positional arguments but %zd were given", function_, num_positional_, num_args);
    }
    std::copy_n(args, num_args, values.begin());
    const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < num_keywords; ++i) {
      PyObject* const name = PyTuple_GET_ITEM(keywords, i);
      const size_t at = index_of(name);
      if (at == kNum) wrong("%s() got an unexpected keyword argument '%U'", function_, name);
      if (values[at] != nullptr) wrong("%s() got multiple values for argument '%U'", function_, name);
      values[at] = args[num_args + i];
    }
    for (size_t i = 0; i < num_required_; ++i) {
      if (values[i] == nullptr) wrong("%s() missing the argument '%U'", function_, names_[i].ptr());
    }
    return values;
  }

 private:
  template <typename... Values>
  [[noreturn]] static void wrong(const char* format, Values... values) {
    PyErr_Format(PyExc_TypeError, format, values...);
    throw py::error_already_set();
  }

  size_t index_of(PyObject* name) const {
    for (size_t i = 0; i < kNum; ++i) {  // names in a program's text are interned
      if (names_[i].ptr() == name) return i;
    }
    for (size_t i = 0; i < kNum; ++i) {
      if (PyUnicode_Compare(names_[i].ptr(), name) == 0) return i;
    }
    return kNum;
  }

  const char* function_;
  size_t num_positional_, num_required_;
  std::array<py::object, kNum> names_;
};

struct AllParameters {
  static const AllParameters& get() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<AllParameters> stored;
    return stored.call_once_and_store_result([] { return AllParameters(); }).get_stored();
  }

  Parameters<3> plain{"require_plain", 2, 2, {"name", "tensor", "traced"}};
  Parameters<7> tensor{"require_tensor", 2, 4, {"name", "tensor", "dtypes", "shape", "device", "contiguous", "traced"}};
  Parameters<1> packed{"packed", 1, 1, {"tensor"}};
  Parameters<2> no_grad{"require_no_grad", 2, 2, {"name", "tensor"}};
  Parameters<5> rows{"require_rows", 5, 4, {"name", "data", "scales", "device", "opaque_scales"}};
  Parameters<4> topk{"require_topk", 4, 4, {"topk_idx", "topk_weights", "num_experts", "device"}};
};

bool is_set(PyObject* flag) {
  const int value = flag == nullptr ? 0 : PyObject_IsTrue(flag);
  if (value < 0) throw py::error_already_set();
  return value == 1;
}

py::object joined(const char* separator, const py::list& texts) {
  return owned(PyUnicode_Join(py::str(separator).ptr(), texts.ptr()));
}

void judge_class(PyObject* name, PyObject* object, const TensorArg& tensor, bool is_traced) {
  if (tensor.is_plain() || (is_traced && tensor.is_of_tracer())) return;
  const py::object type_name = py::type::of(object).attr("__name__");
  if (!tensor.is_tensor()) refuse("%S is %S; allowed: a torch.Tensor", name, type_name.ptr());
  refuse("%S is %S; allowed: a plain torch.Tensor%s", name, type_name.ptr(),
         py::hasattr(object, "to_local") ? ": pass `.to_local()`" : " or torch.nn.Parameter, and no subclass");
}

void judge_plain(PyObject* name, PyObject* object, const TensorArg& tensor, bool is_traced) {
  judge_class(name, object, tensor, is_traced);
  if (!tensor.is_strided()) {
    refuse("%S.layout is %S; allowed: torch.strided", name, tensor.attribute("layout").ptr());
  }
  if (is_traced) return;
  if (is_recorded()) {
    refuse(
        "%S is passed while the program is traced, which would record this call's result as a constant; "
        "allowed: no trace, or the modules of hybrid_ep.nn",
        name);
  }
  if (is_transformed() || tensor.is_lazy()) {
    refuse(
        "%S is a tensor without memory of its own, as transforms of torch.func pass it, or a lazy one; "
        "allowed: a plain torch.Tensor, so no transform around this call",
        name);
  }
}

void judge_dtype(PyObject* name, const TensorArg& tensor, PyObject* dtypes) {
  const py::object dtype = tensor.dtype();
  const int is_allowed = PySequence_Contains(dtypes, dtype.ptr());
  if (is_allowed < 0) throw py::error_already_set();
  if (is_allowed == 1) return;
  py::list names;
  for (const py::handle each : py::reinterpret_borrow<py::object>(dtypes)) names.append(py::str(each));
  refuse("%S.dtype is %S; allowed: %U", name, dtype.ptr(), joined(" or ", names).ptr());
}

void judge_shape(PyObject* name, const TensorArg& tensor, PyObject* shape) {
  if (tensor.has_shape(shape)) return;
  py::list sizes;
  for (const py::handle size : py::reinterpret_borrow<py::object>(shape)) {
    sizes.append(size.is_none() ? py::str("any") : py::str(size));
  }
  const py::object own = owned(PySequence_List(tensor.attribute("shape").ptr()));
  refuse("%S.shape is %S; allowed: [%U]", name, own.ptr(), joined(", ", sizes).ptr());
}

void judge_device(PyObject* name, const TensorArg& tensor, PyObject* device, bool is_traced) {
  const bool is_asked = device != nullptr && device != Py_None;
  if (!is_asked && tensor.is_described()) return;
  const py::object own = tensor.device();
  if (is_asked && own.not_equal(py::handle(device))) refuse("%S.device is %S; allowed: %S", name, own.ptr(), device);
  if (!is_traced && !tensor.is_described() && tensor.attribute("is_meta").ptr() == Py_True) {
    refuse("%S.device is %S; allowed: a device that holds values", name, own.ptr());
  }
}

py::object require_plain(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const auto [name, object, traced] = AllParameters::get().plain.bind(args, num_args, keywords);
  judge_plain(name, object, TensorArg(object), is_set(traced));
  return py::none();
}

py::object require_tensor(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const auto [name, object, dtypes, shape, device, contiguous, traced] =
      AllParameters::get().tensor.bind(args, num_args, keywords);
  const TensorArg tensor(object);
  const bool is_traced = is_set(traced);
  judge_plain(name, object, tensor, is_traced);
  judge_dtype(name, tensor, dtypes);
  judge_shape(name, tensor, shape);
  judge_device(name, tensor, device, is_traced);
  if (is_set(contiguous) && !tensor.is_contiguous()) {
    const py::object strides = tensor.result("stride");
    refuse("%S.stride() is %S; allowed: a contiguous (row-major) tensor", name, strides.ptr());
  }
  return py::reinterpret_borrow<py::object>(object);
}

// The dtypes that checks of whole arguments allow. They are made once.
struct Allowed {
  static const Allowed& get() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Allowed> stored;
    return stored.call_once_and_store_result([] { return Allowed(); }).get_stored();
  }

  static py::object dtype(const char* name) { return py::module_::import("torch").attr(name); }

  py::tuple bf16 = py::make_tuple(dtype("bfloat16")), e4m3 = py::make_tuple(dtype("float8_e4m3fn"));
  py::tuple bytes = py::make_tuple(dtype("float8_e4m3fn"), dtype("uint8"));
  py::tuple scales = py::make_tuple(dtype("float32"), dtype("int32"));
  py::tuple indices = py::make_tuple(dtype("int64")), weights = py::make_tuple(dtype("float32"));
  py::tuple matrix = py::make_tuple(py::none(), py::none());
  py::object int32 = dtype("int32");
};

// As require_tensor, of a tensor that need not be contiguous.
void judge(PyObject* name, const TensorArg& tensor, PyObject* dtypes, PyObject* shape, PyObject* device) {
  judge_plain(name, tensor.object(), tensor, false);
  judge_dtype(name, tensor, dtypes);
  judge_shape(name, tensor, shape);
  judge_device(name, tensor, device, false);
}

void judge_no_grad(PyObject* name, PyObject* tensor) {
  if (!keeps_grad(tensor)) return;
  refuse(
      "%S.requires_grad is True, and this call has no backward pass; allowed: hybrid_ep.nn.MoEDispatch and "
      "MoECombine, an autograd.Function around it, torch.no_grad(), or detach()",
      name);
}

py::object require_no_grad(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const auto [name, tensor] = AllParameters::get().no_grad.bind(args, num_args, keywords);
  judge_no_grad(name, tensor);
  return py::none();
}

py::object packed_of(const TensorArg& tensor) {
  if (tensor.is_described() && tensor.is_contiguous()) return py::reinterpret_borrow<py::object>(tensor.object());
  return tensor.result("contiguous");
}

py::object require_rows(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const auto [name, data, scales, device, opaque] = AllParameters::get().rows.bind(args, num_args, keywords);
  const Allowed& allowed = Allowed::get();
  const TensorArg rows(data);
  if (rows.is_tensor()) judge_no_grad(name, data);
  if (scales == Py_None) {
    judge(name, rows, allowed.bf16.ptr(), allowed.matrix.ptr(), device);
    return py::make_tuple(packed_of(rows), py::none());
  }
  const bool is_opaque = is_set(opaque);
  judge(name, rows, (is_opaque ? allowed.bytes : allowed.e4m3).ptr(), allowed.matrix.ptr(), device);
  const TensorArg of_scales(scales);
  py::object num_scales = py::none();
  if (!is_opaque) {
    const int64_t hidden = rows.size(1);
    if (hidden % kChannelsPerScale != 0) {
      refuse("hidden of %S is %lld; allowed: with FP8: multiples of %d", name, static_cast<long long>(hidden),
             kChannelsPerScale);
    }
    int64_t num = hidden / kChannelsPerScale;
    if (of_scales.is_tensor() && of_scales.dtype().is(allowed.int32)) {
      num = (num + kScalesPerWord - 1) / kScalesPerWord;
    }
    num_scales = py::int_(num);
  }
  const py::object scales_name = owned(PyUnicode_FromFormat("scales of %S", name));
  const py::tuple shape = py::make_tuple(rows.size(0), num_scales);
  judge(scales_name.ptr(), of_scales, allowed.scales.ptr(), shape.ptr(), rows.device().ptr());
  if (of_scales.size(1) == 0) refuse("columns of scales of %S is 0; allowed: %s 1", name, "≥");
  return py::make_tuple(packed_of(rows), packed_of(of_scales));
}

py::object require_topk(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  const auto [topk_idx, topk_weights, num_experts, device] = AllParameters::get().topk.bind(args, num_args, keywords);
  const Allowed& allowed = Allowed::get();
  static PyObject* const idx_name = PyUnicode_InternFromString("topk_idx");
  static PyObject* const weights_name = PyUnicode_InternFromString("topk_weights");
  const TensorArg idx(topk_idx);
  judge(idx_name, idx, allowed.indices.ptr(), allowed.matrix.ptr(), device);
  const int64_t num_topk = idx.size(1), most = std::min<int64_t>(kMaxTopk, PyLong_AsLongLong(num_experts));
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (num_topk < 1 || num_topk > most) {
    refuse("top-k (columns of topk_idx) is %lld; allowed: 1 %s %lld", static_cast<long long>(num_topk), "…",
           static_cast<long long>(most));
  }
  if (topk_weights == Py_None) return py::none();
  const py::tuple shape = py::make_tuple(idx.size(0), num_topk);
  judge(weights_name, TensorArg(topk_weights), allowed.weights.ptr(), shape.ptr(), idx.device().ptr());
  judge_no_grad(weights_name, topk_weights);
  return py::none();
}

py::object packed(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  PyObject* const object = AllParameters::get().packed.bind(args, num_args, keywords)[0];
  if (object == Py_None) return py::none();
  return packed_of(TensorArg(object));
}

py::object are_packed(PyObject* const* args, Py_ssize_t num_args, PyObject*) {
  return py::bool_(std::all_of(
      args, args + num_args, [](PyObject* object) { return object == Py_None || TensorArg(object).is_contiguous(); }));
}

using Function = py::object(PyObject* const* args, Py_ssize_t num_args, PyObject* keywords);

// The form in which Python calls a function without a tuple or a dictionary of arguments.
template <Function* function>
PyObject* called(PyObject*, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) try {
  return function(args, num_args, keywords).release().ptr();
} catch (py::error_already_set& error) {
  error.restore();
  return nullptr;
}

template <Function* function>
PyMethodDef method(const char* name) {
  const auto address = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&called<function>));
  return {name, address, METH_FASTCALL | METH_KEYWORDS, nullptr};
}

}  // namespace

void add_judge(py::module_& module) {
  // No functions of pybind11, whose call would take as long as a check.
  static PyMethodDef methods[]{method<require_plain>("require_plain"),     method<require_tensor>("require_tensor"),
                               method<require_no_grad>("require_no_grad"), method<require_rows>("require_rows"),
                               method<require_topk>("require_topk"),       method<packed>("packed"),
                               method<are_packed>("are_packed"),           {}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace hybrid_ep::calls
