#include "calls/request.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "common/check.h"
#include "layout/limits.h"

namespace hybrid_ep::calls {
namespace {

namespace py = pybind11;
using bindings::address_of;

// By number, as hybrid_ep/agree/fields.py has them.
constexpr std::array kDtypeNames{"torch.bfloat16", "torch.float8_e4m3fn", "torch.float32", "torch.int32",
                                 "torch.uint8"};

// An attribute that every call reads.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  py::object operator()(py::handle of) const {
    PyObject* const value = PyObject_GetAttr(of.ptr(), name_);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }
  int integer(py::handle of) const { return as_integer((*this)(of)); }
  std::optional<int> optional(py::handle of) const {
    const py::object value = (*this)(of);
    return value.is_none() ? std::nullopt : std::optional(as_integer(value));
  }
  bool flag(py::handle of) const { return (*this)(of).ptr() == Py_True; }

 private:
  static int as_integer(const py::object& value) {
    const long number = PyLong_AsLong(value.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return static_cast<int>(number);
  }

  PyObject* name_;
};

struct Attributes {
  Attribute rows{"rows"}, data{"data"}, scales{"scales"}, routing{"routing"}, topk_idx{"topk_idx"};
  Attribute topk_weights{"topk_weights"}, num_experts{"num_experts"}, has_topk{"has_topk"}, max_tokens{"max_tokens"};
  Attribute bound{"bound"}, num_sms{"num_sms"}, expert_range{"expert_range"}, common_bound{"common_bound"};
  Attribute pad_multiple{"pad_multiple"}, num_expert_sms{"num_expert_sms"}, replicas{"replicas"}, along{"along"};
  Attribute drops_rows{"drops_rows"}, experts{"experts"}, checksum{"checksum"}, state{"state"};
  Attribute num_tokens{"num_tokens"}, num_topk{"num_topk"}, weights{"weights"}, bias{"bias"}, dispatch{"dispatch"};
  Attribute num_permuted{"num_permuted"}, address{"address"}, shape{"shape"}, dtype{"dtype"};
};

const Attributes& attributes() {
  static const Attributes* const found = new Attributes;
  return *found;
}

// The number of a tensor's dtype.
int dtype_of(py::handle tensor) {
  static const auto* const dtypes = [] {
    auto* found = new std::array<py::object, kDtypeNames.size()>;
    const py::module_ torch = py::module_::import("torch");
    for (size_t i = 0; i < found->size(); ++i) (*found)[i] = torch.attr(kDtypeNames[i] + std::strlen("torch."));
    return found;
  }();
  const py::object dtype = attributes().dtype(tensor);
  for (size_t i = 0; i < dtypes->size(); ++i) {
    if ((*dtypes)[i].is(dtype)) return static_cast<int>(i);
  }
  throw py::value_error("dtype is " + py::repr(dtype).cast<std::string>() + "; allowed: one that ranks compare");
}

// Classes of Python.
py::handle dispatch_handle() {
  static const auto* const found = new py::object(py::module_::import("hybrid_ep.engine.calls").attr("DispatchHandle"));
  return *found;
}

py::handle permute_state() {
  static const auto* const found =
      new py::object(py::module_::import("hybrid_ep.engine.cuda.route").attr("PermuteState"));
  return *found;
}

void set_rows(DispatchRequest* sizes, const RowsArgument& rows) {
  sizes->num_tokens = rows.num_tokens;
  sizes->hidden = rows.hidden;
  sizes->dtype = rows.dtype;
  sizes->num_scales = rows.num_scales;
  sizes->scale_dtype = rows.scale_dtype;
}

}  // namespace

void require_sizes(int64_t num_experts, int64_t hidden, int dtype) {
  if (num_experts > kMaxExperts) {
    throw ConfigError("num_experts is " + std::to_string(num_experts) + "; allowed with the cuda engine: ≤ " +
                      std::to_string(kMaxExperts));
  }
  const int64_t row_bytes = hidden * bytes_of(dtype);
  if (row_bytes % kRowAlignBytes != 0 || row_bytes <= 0 || row_bytes > kMaxRowBytes) {
    throw ConfigError("a row of " + std::to_string(hidden) + " × " + kDtypeNames.at(dtype) + " has " +
                      std::to_string(row_bytes) + " bytes; allowed: multiples of " + std::to_string(kRowAlignBytes) +
                      " up to " + std::to_string(kMaxRowBytes));
  }
}

int size_of(py::handle tensor, int dimension) {
  const py::object shape = attributes().shape(tensor);
  return static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(shape.ptr(), dimension)));
}

py::object aligned(py::object tensor) {
  return address_of(tensor) % kRowAlignBytes == 0 ? std::move(tensor) : tensor.attr("clone")();
}

HandleArgument::HandleArgument(py::handle handle)
    : dispatch(py::reinterpret_borrow<py::object>(handle)), is_by_expert(!py::isinstance(handle, dispatch_handle())) {
  const Attributes& of = attributes();
  if (is_by_expert) {
    dispatch = of.dispatch(handle);
    kept = of.state(handle);
    num_permuted = of.num_permuted.integer(handle);
    pad_multiple = of.pad_multiple.integer(handle);
  }
  const py::object state = of.state(dispatch);
  if (!py::isinstance<Route>(state) || (is_by_expert && !py::isinstance(kept, permute_state()))) {
    throw ConfigError("handle is of another engine; allowed: one that a dispatch of this buffer's engine returned");
  }
  route = &state.cast<Route&>();
  if (is_by_expert) kept_at = static_cast<uintptr_t>(of.address(kept).cast<uint64_t>());
}

RowsArgument::RowsArgument(py::handle rows)
    : data(aligned(attributes().data(rows))),
      scales(aligned(attributes().scales(rows))),
      data_at(address_of(data)),
      scales_at(address_of(scales)) {
  num_tokens = size_of(data, 0);
  hidden = size_of(data, 1);
  dtype = dtype_of(data);
  if (scales.is_none()) return;
  num_scales = size_of(scales, 1);
  scale_dtype = dtype_of(scales);
}

DispatchArguments::DispatchArguments(py::handle request, int rank, int num_ranks)
    : sizes{}, rows(attributes().rows(request)) {
  const Attributes& of = attributes();
  const py::object routing = of.routing(request), replicas = of.replicas(request), earlier = of.along(request);
  topk_idx = of.topk_idx(routing);
  topk_weights = of.topk_weights(routing);
  set_rows(&sizes, rows);
  sizes.num_topk = size_of(topk_idx, 1);
  sizes.num_experts = of.num_experts.integer(routing);
  sizes.has_topk = of.has_topk.flag(routing);
  sizes.has_weights = !topk_weights.is_none();
  sizes.max_tokens = of.max_tokens.optional(routing);
  const py::object range = of.expert_range(request);
  const int num_local = sizes.num_experts / num_ranks;
  sizes.expert_range = ExpertRange{rank * num_local, (rank + 1) * num_local};
  if (!range.is_none()) {
    const auto [first, end] = range.cast<std::pair<int, int>>();
    sizes.expert_range = ExpertRange{first, end};
  }
  sizes.pad_multiple = of.pad_multiple.integer(request);
  sizes.bound = of.bound.optional(request);
  sizes.common_bound = of.common_bound.optional(request);
  sizes.num_sms = of.num_sms.optional(request);
  sizes.drops_rows = of.drops_rows.flag(request);
  num_expert_sms = of.num_expert_sms.optional(request).value_or(0);
  if (!replicas.is_none()) {
    const py::object mapping = of.experts(replicas);
    sizes.num_mapped_ranks = size_of(mapping, 0);
    sizes.num_slots = size_of(mapping, 1);
    checksum_at = address_of(of.checksum(replicas));
  }
  // With a bound of copies, every token of every rank may arrive.
  if (sizes.bound && sizes.pad_multiple > 0) {
    sizes.num_records = num_ranks * std::min(sizes.max_tokens.value_or(0), kMaxTokens);
  }
  if (!earlier.is_none()) {
    const Route& route = *HandleArgument(earlier).route;
    again = route.number;
    if (sizes.bound && sizes.pad_multiple > 0) sizes.num_records = route.num_records;
  }
  require_sizes(sizes.num_experts, sizes.hidden, sizes.dtype);
}

AlongArguments::AlongArguments(py::handle request)
    : sizes{}, rows(attributes().rows(request)), handle(attributes().along(request)) {
  const Attributes& of = attributes();
  set_rows(&sizes, rows);
  sizes.num_topk = of.num_topk.integer(handle.dispatch);
  sizes.num_experts = of.num_experts.integer(handle.dispatch);
  sizes.has_topk = true;
  sizes.pad_multiple = handle.pad_multiple;
  sizes.bound = handle.route->max_recv;
  sizes.num_sms = of.num_sms.optional(request);
  sizes.num_records = handle.is_by_expert ? handle.route->num_records : 0;
  num_expert_sms = of.num_expert_sms.optional(request).value_or(0);
  require_sizes(sizes.num_experts, sizes.hidden, sizes.dtype);
}

CombineArguments::CombineArguments(py::handle request, py::handle handle_given)
    : plan{}, data(attributes().data(request)), weights(attributes().weights(request)), handle(handle_given) {
  const Attributes& of = attributes();
  num_rows = size_of(data, 0);
  hidden = size_of(data, 1);
  const int dtype = dtype_of(data);
  plan.num_tokens = of.num_tokens.integer(handle.dispatch);
  plan.num_topk = of.num_topk.integer(handle.dispatch);
  plan.num_experts = of.num_experts.integer(handle.dispatch);
  if (!weights.is_none()) plan.num_weights = handle.is_by_expert ? plan.num_topk : size_of(weights, 1);
  plan.num_sms = of.num_sms.optional(request).value_or(0);
  plan.num_expert_sms = of.num_expert_sms.optional(request).value_or(0);
  require_sizes(plan.num_experts, hidden, dtype);
  plan.widths.rows = hidden * bytes_of(dtype);
  plan.widths.weights = static_cast<int64_t>(plan.num_weights) * sizeof(float);
  const py::tuple terms = of.bias(request);
  for (size_t i = 0; i < 2; ++i) bias[i] = i < terms.size() ? py::object(terms[i]) : py::object(py::none());
}

}  // namespace hybrid_ep::calls
