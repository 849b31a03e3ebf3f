// Dispatches and combines that repeat an earlier call, within a domain and with rows by expert.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/cuda/address.h"
#include "bindings/cuda/bindings.h"
#include "bindings/cuda/engine_calls.h"
#include "bindings/cuda/fast_call.h"
#include "bindings/cuda/named_tuple.h"
#include "bindings/cuda/new_tensor.h"
#include "bindings/cuda/route_memory.h"
#include "bindings/cuda/slot_tensors.h"
#include "bindings/cuda/topk_probs.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

// The classes of hybrid_ep/engine of which handles are made.
struct HandleTypes {
  explicit HandleTypes(const py::tuple& types)
      : route(types[0]), dispatch(types[1]), permute_state(types[2]), permute(types[3]) {
    require_dispatch_handle(dispatch);
    require_permute_handle(permute);
  }

  py::object route, dispatch, permute_state, permute;
};

// The fields of a PermuteHandle that calls read.
struct PermuteFields {
  py::handle dispatch;
  int num_permuted;
  uintptr_t kept;           // the address in its PermuteState
  py::object communicator;  // likewise

  // nullopt: an engine of another kind has made the handle.
  static std::optional<PermuteFields> of(py::handle handle, const HandleTypes& types) {
    const auto item = [&](int i) { return py::handle(PyTuple_GET_ITEM(handle.ptr(), i)); };
    static PyObject* const address = PyUnicode_InternFromString("address");
    static PyObject* const communicator = PyUnicode_InternFromString("communicator");
    const py::handle state = item(4);
    if (!EngineCalls::is_of(state, types.permute_state)) return std::nullopt;
    return PermuteFields{item(0), item(2).cast<int>(), state.attr(address).cast<uintptr_t>(), state.attr(communicator)};
  }
};

int64_t kept_ints(int num_recv, int num_topk) { return static_cast<int64_t>(num_recv) * (num_topk + 1); }

// Dispatches that make their route.
class RepeatedPermutedDispatch {
 public:
  // Without a bound each call waits for its counts. `make_probs` and `make_scales` make one for any number of rows,
  // `make_counts` the counts of a call that waits.
  RepeatedPermutedDispatch(py::handle engine, const DispatchPlan& plan, std::optional<int> bound, int num_expert_sms,
                           const std::optional<NewTensor>& make_probs, const std::optional<NewTensor>& make_scales,
                           const NewTensor& make_counts, py::object grid, const py::tuple& types)
      : types_(types),
        calls_(engine, types_.route),
        plan_(plan),
        bound_(bound),
        num_expert_sms_(num_expert_sms),
        slot_bytes_(plan.slot_bytes_for(bound.value_or(0))),
        make_probs_(make_probs),
        make_scales_(make_scales),
        make_counts_(make_counts),
        grid_(std::move(grid)) {}

  // Takes rows, scales, top-k indices and weights. Returns rows, scales, probabilities, counts, the PermuteHandle, and
  // a copy of the given top-k indices.
  py::object call(FastArguments arguments) {
    const OneCall one_call = calls_.begin_call();
    if (!one_call.is_begun()) return py::none();
    const auto begun = calls_.begin_dispatch(plan_, arguments);
    if (!begun) return py::none();
    auto& slots = begun->slots.cast<SlotTensors&>();
    return bound_ ? bounded(slots, *begun) : waiting(slots, *begun);
  }

 private:
  // What a handle has of the rows.
  struct Sizes {
    int num_rows, num_recv, max_rows, max_sent, num_sent_away, num_from_away;
  };

  py::object bounded(SlotTensors& slots, const EngineCalls::BegunDispatch& begun) const {
    const auto& [_, given, piece, stream] = begun;
    if (slot_bytes_ > slots.slot_bytes()) return py::none();
    auto slot = slots.launch(calls_.communicator, plan_, given, kAbsent, stream);
    if (!slot) return py::none();
    const int number = calls_.count();
    // The bound counts copies, and more rows than that may arrive when it is exceeded.
    const int num_recv = calls_.communicator.num_records(plan_);
    return completed(*slot, {*bound_, num_recv, *bound_, plan_.most_sent(), 0, 0}, nullptr, piece, number, stream);
  }

  py::object waiting(SlotTensors& slots, const EngineCalls::BegunDispatch& begun) const {
    const auto& [_, given, piece, stream] = begun;
    auto slot = slots.launch(calls_.communicator, plan_, given, kAbsent, stream);
    if (!slot) return py::none();
    const int number = calls_.count();
    const auto found = calls_.wait(plan_, slot->counts_epoch, stream);
    if (!found) return py::none();
    const Sizes sizes{found->num_permuted, found->num_recv,      found->max_rows,
                      found->max_sent,     found->num_sent_away, found->num_recv - found->num_kept};
    return completed(*slot, sizes, &found->num_tokens_per_expert, piece, number, stream);
  }

  // Completes the rows in a slot, and makes the results. `on_host`: counts that the host has waited for, or nullptr.
  py::object completed(FilledSlot& slot, const Sizes& sizes, const std::vector<int32_t>* on_host,
                       const RouteMemory::Piece& piece, int number, cudaStream_t stream) const {
    const auto kept =
        calls_.routes.take(kept_ints(sizes.num_recv, plan_.num_topk), reinterpret_cast<uintptr_t>(stream), false);
    uintptr_t probs_at = 0, scales_at = 0;
    const py::object probs = make_probs_ ? make_probs_->make_rows(sizes.num_rows, &probs_at) : py::none();
    const py::object scales = make_scales_ ? make_scales_->make_rows(sizes.num_rows, &scales_at) : py::none();
    // Before all else that the host does, for which the GPU need not wait.
    calls_.communicator.duplicate(plan_,
                                  {pointer<int32_t>(piece.address), pointer<int32_t>(kept.address),
                                   pointer<float>(probs_at), pointer<uint32_t>(scales_at)},
                                  slot.slot_idx(), sizes.num_rows, sizes.num_recv, num_expert_sms_, stream);
    const SlotResults made = slot.tensors(plan_, sizes.num_rows, piece.memory, piece.address);
    calls_.end();
    const py::object counts = on_host == nullptr ? made.counts : counts_of(*on_host);
    const int64_t counts_at = plan_.route.num_tokens_per_expert + plan_.num_experts / plan_.num_ranks;
    const py::object route =
        calls_.make_route(piece, counts_at, sizes.num_recv, sizes.max_rows, sizes.max_sent, sizes.num_sent_away,
                          sizes.num_from_away, plan_.num_records, number, stream);
    const py::object dispatch = make_named(types_.dispatch, made.rank_prefix, plan_.num_tokens, sizes.num_recv,
                                           plan_.num_experts, plan_.num_topk, grid_, route);
    const py::object state = types_.permute_state(kept.chunk, kept.address, calls_.own_communicator());
    const py::object handle =
        make_named(types_.permute, dispatch, counts, sizes.num_rows, plan_.pad_multiple, state, made.overflow);
    return py::make_tuple(made.rows, scales, probs, counts, handle, calls_.topk_of(piece, plan_));
  }
  py::object counts_of(const std::vector<int32_t>& on_host) const {
    uintptr_t address = 0;
    py::object counts = make_counts_.make(&address);
    std::copy(on_host.begin(), on_host.end(), pointer<int64_t>(address));
    return counts;
  }

  HandleTypes types_;
  EngineCalls calls_;
  DispatchPlan plan_;
  std::optional<int> bound_;
  int num_expert_sms_;
  int64_t slot_bytes_;
  std::optional<NewTensor> make_probs_, make_scales_;
  NewTensor make_counts_;
  py::object grid_;
};

// Dispatches of rows along the routes of handles.
class RepeatedPermutedDispatchAlong {
 public:
  // `plan` serves any route: what depends on the route's rows is set for each call.
  RepeatedPermutedDispatchAlong(py::handle engine, const DispatchPlan& plan, int num_expert_sms,
                                const std::optional<NewTensor>& make_scales, const py::tuple& types)
      : types_(types),
        calls_(engine, types_.route),
        plan_(plan),
        num_expert_sms_(num_expert_sms),
        make_scales_(make_scales) {}

  // Takes rows, scales and the PermuteHandle. Returns rows and scales.
  py::object call(FastArguments arguments) {
    const OneCall one_call = calls_.begin_call();
    if (!one_call.is_begun()) return py::none();
    const auto along = PermuteFields::of(arguments[2], types_);
    const py::object slots = along ? calls_.slots() : py::none();
    const std::optional<cudaStream_t> stream = slots.is_none() ? std::nullopt : calls_.begin();
    const auto route = stream ? calls_.route_for(along->dispatch, *stream) : std::nullopt;
    if (!route) return py::none();
    const DispatchTensors given = tensors_of(address_of(arguments[0]), 0, 0, address_of(arguments[1]), route->address);
    const DispatchPlan plan = plan_.along(route->max_recv, route->num_records);
    auto& tensors = slots.cast<SlotTensors&>();
    if (plan.slot_bytes_for(route->max_recv) > tensors.slot_bytes()) return py::none();
    auto slot = tensors.launch(calls_.communicator, plan, given, route->number, *stream);
    if (!slot) return py::none();
    calls_.count();
    calls_.count_traffic(route->num_sent_away * plan.format.widths().record_bytes());
    uintptr_t scales_at = 0;
    const py::object scales = make_scales_ ? make_scales_->make_rows(along->num_permuted, &scales_at) : py::none();
    calls_.communicator.duplicate(plan,
                                  {given.route, pointer<int32_t>(along->kept), nullptr, pointer<uint32_t>(scales_at)},
                                  slot->slot_idx(), along->num_permuted, route->num_recv, num_expert_sms_, *stream);
    const SlotResults made = slot->tensors(plan, along->num_permuted, py::none(), route->address);
    calls_.end();
    return py::make_tuple(made.rows, scales);
  }

 private:
  HandleTypes types_;
  EngineCalls calls_;
  DispatchPlan plan_;
  int num_expert_sms_;
  std::optional<NewTensor> make_scales_;
};

class RepeatedPermutedCombine {
 public:
  // `make_sums` and `make_weights` make what the experts' kernel writes, for any number of rows. Without probabilities,
  // all but `make_sums` and `make_out` are nullopt. `dense`: sums of probabilities are returned for all experts,
  // otherwise in the columns of the top-k.
  RepeatedPermutedCombine(py::handle engine, const CombinePlan& plan, const NewTensor& make_sums,
                          const std::optional<NewTensor>& make_weights, const NewTensor& make_out,
                          const std::optional<NewTensor>& make_out_weights, const std::optional<TopkProbs>& dense,
                          const py::tuple& types)
      : types_(types),
        calls_(engine, types_.route),
        plan_(plan),
        make_sums_(make_sums),
        make_weights_(make_weights),
        make_out_(make_out),
        make_out_weights_(make_out_weights),
        dense_(dense) {}

  // Takes rows, probabilities, the PermuteHandle and its top-k indices, which only sums for all experts need. Returns
  // the sums of rows, and those of probabilities.
  py::object call(FastArguments arguments) const {
    const OneCall one_call = calls_.begin_call();
    if (!one_call.is_begun()) return py::none();
    const uintptr_t rows = address_of(arguments[0]), probs = address_of(arguments[1]);
    const auto along = PermuteFields::of(arguments[2], types_);
    if (!along || rows % kRowAlignBytes != 0) return py::none();
    // Each communicator numbers its own combines; Python clears the numbers of another one.
    if (!along->communicator.is(calls_.own_communicator())) return py::none();
    const py::object slots = calls_.slots();
    const std::optional<cudaStream_t> stream = slots.is_none() ? std::nullopt : calls_.begin();
    const auto route = stream ? calls_.route_for(along->dispatch, *stream) : std::nullopt;
    if (!route) return py::none();
    if (slot_bytes_for(plan_.widths, route->max_sent) > slots.cast<const SlotTensors&>().slot_bytes())
      return py::none();
    uintptr_t sums_at = 0, weights_at = 0, out_at = 0, out_weights_at = 0;
    const py::object sums = make_sums_.make_rows(route->num_recv, &sums_at);
    const py::object weights = make_weights_ ? make_weights_->make_rows(route->num_recv, &weights_at) : py::none();
    const py::object out = make_out_.make(&out_at);
    const py::object out_weights = make_out_weights_ ? make_out_weights_->make(&out_weights_at) : py::none();
    calls_.communicator.combine(
        plan_,
        {pointer<uint8_t>(sums_at),
         route->num_recv,
         pointer<float>(weights_at),
         {},
         pointer<uint8_t>(out_at),
         pointer<float>(out_weights_at),
         pointer<int32_t>(route->address)},
        {pointer<uint8_t>(rows), along->num_permuted, pointer<float>(probs), pointer<int32_t>(along->kept)},
        route->number, *stream);
    calls_.count();
    calls_.count_traffic(route->num_from_away * plan_.widths.record_bytes());
    calls_.end();
    if (!dense_) return py::make_tuple(out, out_weights);
    PyObject* const sent[] = {arguments[3], out_weights.ptr()};
    return py::make_tuple(out, dense_->sum_weights(sent));
  }

 private:
  HandleTypes types_;
  EngineCalls calls_;
  CombinePlan plan_;
  NewTensor make_sums_;
  std::optional<NewTensor> make_weights_;
  NewTensor make_out_;
  std::optional<NewTensor> make_out_weights_;
  std::optional<TopkProbs> dense_;
};

}  // namespace

void add_permuted_calls(py::module_& module) {
  using OptionalTensor = const std::optional<NewTensor>&;
  py::class_<RepeatedPermutedDispatch>(module, "RepeatedPermutedDispatch")
      .def(py::init<py::handle, const DispatchPlan&, std::optional<int>, int, OptionalTensor, OptionalTensor,
                    const NewTensor&, py::object, const py::tuple&>(),
           py::arg("engine"), py::arg("plan"), py::arg("bound"), py::arg("num_expert_sms"), py::arg("make_probs"),
           py::arg("make_scales"), py::arg("make_counts"), py::arg("grid"), py::arg("types"))
      .def_property_readonly("call", &fast_call<&RepeatedPermutedDispatch::call, 4>);
  py::class_<RepeatedPermutedDispatchAlong>(module, "RepeatedPermutedDispatchAlong")
      .def(py::init<py::handle, const DispatchPlan&, int, OptionalTensor, const py::tuple&>(), py::arg("engine"),
           py::arg("plan"), py::arg("num_expert_sms"), py::arg("make_scales"), py::arg("types"))
      .def_property_readonly("call", &fast_call<&RepeatedPermutedDispatchAlong::call, 3>);
  py::class_<RepeatedPermutedCombine>(module, "RepeatedPermutedCombine")
      .def(py::init<py::handle, const CombinePlan&, const NewTensor&, OptionalTensor, const NewTensor&, OptionalTensor,
                    const std::optional<TopkProbs>&, const py::tuple&>(),
           py::arg("engine"), py::arg("plan"), py::arg("make_sums"), py::arg("make_weights"), py::arg("make_out"),
           py::arg("make_out_weights"), py::arg("dense"), py::arg("types"))
      .def_property_readonly("call", &fast_call<&RepeatedPermutedCombine::call, 4>);
}

}  // namespace hybrid_ep::bindings
