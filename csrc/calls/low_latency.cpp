// Low-latency calls. Each is one call of C++: it plans, takes a buffer and memory for the results, launches, and makes
// the tensors. Python grows the memory, and deals with faults and masks: hybrid_ep/engine/cuda/low_latency.py.
#include "bindings/cuda/low_latency.h"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/cuda/address.h"
#include "bindings/cuda/new_tensor.h"
#include "bindings/cuda/ordered_launches.h"
#include "bindings/cuda/route_memory.h"
#include "bindings/cuda/tensors.h"
#include "calls/request.h"
#include "common/check.h"

namespace hybrid_ep::calls {
namespace {

namespace py = pybind11;
using bindings::address_of;
using bindings::Dtype;
using bindings::OrderedLaunches;
using bindings::pointer;
using bindings::RouteMemory;
using bindings::stream_of;
using bindings::TensorDevice;

// Which buffers of one kind are in use: sent into and not yet received from.
class BuffersInUse {
 public:
  // Whether no call can be sent.
  bool are_in_flight() const { return in_flight_[next_]; }
  bool any_in_flight() const { return in_flight_[0] || in_flight_[1]; }
  // The buffer that the next call sends into.
  int next(const char* call) const {
    if (!are_in_flight()) return next_;
    throw ConfigError(std::string(call) + " calls whose hook has not been called are " +
                      std::to_string(kLowLatencyBuffers + 1) + "; allowed: at most " +
                      std::to_string(kLowLatencyBuffers));
  }
  // Must be called only once a launch has succeeded: the numbers of calls on the device count launches.
  void note(int idx, Halves halves) {
    in_flight_.at(idx) = halves == Halves::kSend;
    if (halves != Halves::kReceive) next_ = (next_ + 1) % kLowLatencyBuffers;
  }

 private:
  int next_ = 0;
  std::array<bool, kLowLatencyBuffers> in_flight_{};
};
static_assert(kLowLatencyBuffers == 2);

// What calls go through until their memory grows or they are forgotten. Hooks keep that of their calls.
struct Passage {
  py::object kept;  // the region
  LowLatencyRegion& region;
  uint32_t counter;  // of the calls of the region
  BuffersInUse dispatches{}, combines{};
};

// What the engine keeps in a handle.
struct State {
  LowLatencyPlan plan;
  int num_tokens, device;
  py::object chunk, memory;  // the memory that the results beside the rows are a piece of
  uintptr_t results, stream;
  bool is_received = false;

  // Must be called before another use of the results. `on` is the current stream.
  void note_use(cudaStream_t on) const {
    if (on != stream_of(stream)) chunk.attr("note_use")(reinterpret_cast<uintptr_t>(on));
  }
};

struct NewRows {
  py::object rows, scales;
  uintptr_t rows_address = 0, scales_address = 0;
};

// Packed rows and their scales, as PackedLayout of hybrid_ep/engine/packed.py has them.
NewRows new_rows(const LowLatencyPlan& plan, const TensorDevice& device) {
  const int64_t num_local = plan.shape.num_experts / plan.num_ranks;
  const int64_t capacity = static_cast<int64_t>(plan.num_ranks) * plan.shape.max_tokens;
  const int64_t num_words = plan.message.num_scale_words;
  NewRows made{{}, py::none()};
  const auto make_rows = [&](int64_t width, Dtype dtype) {
    made.rows =
        device.new_tensor({num_local, capacity, width}, {capacity * width, width, 1}, dtype, &made.rows_address);
  };
  if (plan.format == ScaleFormat::kNone) {
    make_rows(plan.shape.hidden, Dtype::kBfloat16);
  } else if (is_nvfp4(plan.format)) {
    constexpr int64_t kTileRows = 128, kLanes = 32, kRowsPerLane = kTileRows / kLanes, kTile = 512;
    const int64_t num_tiles = (capacity + kTileRows - 1) / kTileRows;
    make_rows(plan.shape.hidden / 2, Dtype::kUint8);
    made.scales = device.new_tensor(
        {num_local, num_tiles, num_words, kLanes, kRowsPerLane, kScalesPerWord},
        {num_tiles * num_words * kTile, num_words * kTile, kTile, kRowsPerLane * kScalesPerWord, kScalesPerWord, 1},
        plan.format == ScaleFormat::kNvfp4 ? Dtype::kFloat8 : Dtype::kInt8, &made.scales_address);
  } else {
    make_rows(plan.shape.hidden, Dtype::kFloat8);
    made.scales =
        device.new_tensor({num_local, capacity, num_words}, {num_words * capacity, 1, capacity},
                          plan.format == ScaleFormat::kUe8m0 ? Dtype::kInt32 : Dtype::kFloat32, &made.scales_address);
  }
  return made;
}

// The second half of a call that has been sent.
class Receive {
 public:
  // Launches on a stream. It keeps the tensors that the launch uses.
  using Launch = std::function<void(cudaStream_t)>;

  Receive(const OrderedLaunches& launches, py::object state, Launch launch)
      : launches_(launches), state_(std::move(state)), launch_(std::move(launch)) {}

  void operator()() const {
    const cudaStream_t stream = launches_.current();
    auto& state = state_.cast<State&>();
    state.note_use(stream);
    launch_(stream);
    state.is_received = true;
  }

 private:
  const OrderedLaunches& launches_;
  py::object state_;
  Launch launch_;
};

class LowLatencyCalls {
 public:
  // `results` is the memory for what dispatches return beside their rows.
  LowLatencyCalls(const Communicator& communicator, OrderedLaunches& launches, RouteMemory& results, int num_ranks,
                  const py::object& device, bool by_python)
      : launches_(launches),
        results_(results),
        num_ranks_(num_ranks),
        device_index_(communicator.device()),
        device_(device, by_python) {}

  // Forgets all calls. Those that follow go through the region; None: there is none.
  void begin(const py::object& region, uint32_t counter) {
    passage_.reset();
    if (!region.is_none()) {
      passage_ = std::make_shared<Passage>(Passage{region, region.cast<LowLatencyRegion&>(), counter});
    }
  }
  bool covers(const LowLatencyPlan& plan) const { return passage_ && passage_->region.covers(plan); }
  bool can_send(LowLatencyKind kind) const { return !passage_ || !buffers(*passage_, kind).are_in_flight(); }
  bool are_in_flight() const {
    return passage_ && (passage_->dispatches.any_in_flight() || passage_->combines.any_in_flight());
  }

  // The plan of a LowLatencyDispatchRequest.
  LowLatencyPlan plan_of(const py::object& request, int format) const {
    const int hidden = size_of(request.attr("data"), 1), num_topk = size_of(request.attr("topk_idx"), 1);
    const auto num_experts = request.attr("num_experts").cast<int64_t>();
    const auto max_tokens = request.attr("num_max_tokens_per_rank").cast<int64_t>();
    require_sizes(num_experts, hidden, kBf16);
    if (max_tokens > kMaxLowLatencyTokens) {
      throw ConfigError("num_max_dispatch_tokens_per_rank is " + std::to_string(max_tokens) +
                        "; allowed with the cuda engine: ≤ " + std::to_string(kMaxLowLatencyTokens));
    }
    return LowLatencyPlan::of({static_cast<int>(num_experts), num_topk, hidden, static_cast<int>(max_tokens)},
                              static_cast<ScaleFormat>(format), num_ranks_);
  }

  // Returns rows, scales, counts, the State and, with a hook, the Receive. Where the region is too small, nothing is
  // done, and the result is the plan.
  py::object dispatch(const py::object& request, int format) {
    const LowLatencyPlan plan = plan_of(request, format);
    if (!covers(plan)) return py::cast(plan);
    const std::shared_ptr<Passage> passage = passage_;
    const cudaStream_t stream = launches_.current();
    const bool has_hook = request.attr("return_recv_hook").cast<bool>();
    const py::object data = aligned(request.attr("data")), topk_idx = request.attr("topk_idx");
    const py::object global_scale = request.attr("global_scale"), wait_stats = request.attr("wait_stats");
    const int num_tokens = size_of(topk_idx, 0);
    // Torch may let another thread call while it makes tensors. So the buffer is chosen after that.
    auto piece = results_.take(passage->region.num_ints(plan), reinterpret_cast<uintptr_t>(stream),
                               /*alone=*/passage->region.is_capturing(stream));
    const NewRows made = new_rows(plan, device_);
    LowLatencyDispatch call{};
    call.buffer_idx = passage->dispatches.next("low_latency_dispatch");
    call.rows = pointer<uint8_t>(address_of(data));
    call.topk_idx = pointer<int64_t>(address_of(topk_idx));
    call.num_tokens = num_tokens;
    call.global_scale = pointer<float>(address_of(global_scale));
    call.counter = passage->counter;
    call.received_rows = pointer<uint8_t>(made.rows_address);
    call.received_scales = pointer<uint32_t>(made.scales_address);
    call.wait_stats = pointer<int64_t>(address_of(wait_stats));
    call.results = pointer<int32_t>(piece.address);
    launch(*passage, plan, call, has_hook ? Halves::kSend : Halves::kBoth, stream);
    // What Python needs is made after the launch, beside the kernel.
    const py::object counts = bindings::make_counts(plan, piece.memory, piece.address, device_index_);
    const py::object state =
        py::cast(State{plan, num_tokens, device_index_, std::move(piece.chunk), std::move(piece.memory), piece.address,
                       reinterpret_cast<uintptr_t>(stream), !has_hook});
    py::object receive = py::none();
    if (has_hook) {
      receive = py::cast(Receive(launches_, state,
                                 [this, passage, plan, call, kept = py::make_tuple(made.rows, made.scales, wait_stats)](
                                     cudaStream_t on) { launch(*passage, plan, call, Halves::kReceive, on); }));
    }
    return py::make_tuple(made.rows, made.scales, counts, state, receive);
  }

  // Takes a LowLatencyCombineRequest. Returns the Receive with a hook, otherwise None.
  py::object combine(const py::object& request, const py::object& handle_state) {
    const auto& state = handle_state.cast<State&>();
    const py::object topk_idx = request.attr("topk_idx"), signals = request.attr("signals");
    py::object data = request.attr("data");
    require_combine(state, topk_idx, data, !signals.is_none());
    const std::shared_ptr<Passage> passage = passage_;
    const cudaStream_t stream = launches_.current();
    const bool has_hook = request.attr("return_recv_hook").cast<bool>();
    const py::object out = request.attr("out"), wait_stats = request.attr("wait_stats");
    if (signals.is_none()) data = aligned(std::move(data));
    const py::object weights = aligned(request.attr("topk_weights")), target = aligned(out);
    state.note_use(stream);
    LowLatencyCombine call{};
    call.results = pointer<int32_t>(state.results);
    call.topk_weights = pointer<float>(address_of(weights));
    call.num_tokens = state.num_tokens;
    call.use_logfmt = request.attr("use_logfmt").cast<bool>();
    call.wait_stats = pointer<int64_t>(address_of(wait_stats));
    call.rows = pointer<uint8_t>(address_of(data));
    call.min_tokens_to_sum = request.attr("min_tokens_to_sum").cast<int>();
    if (!signals.is_none()) {
      call.signals = {pointer<uint32_t>(address_of(signals.attr("raised"))), signals.attr("expected").cast<uint32_t>(),
                      signals.attr("num_per_expert").cast<int>(), signals.attr("rows_per_signal").cast<int>()};
      call.num_sms = signals.attr("num_sms").cast<int>();
    }
    call.topk_idx = pointer<int64_t>(address_of(topk_idx));
    call.out = pointer<uint8_t>(address_of(target));
    call.buffer_idx = passage->combines.next("low_latency_combine");
    launch(*passage, state.plan, call, has_hook ? Halves::kSend : Halves::kBoth, stream);
    if (!has_hook) {
      if (!target.is(out)) out.attr("copy_")(target);
      return py::none();
    }
    const auto receive = [this, passage, plan = state.plan, call, out, target,
                          kept = py::make_tuple(topk_idx, weights, wait_stats)](cudaStream_t on) {
      launch(*passage, plan, call, Halves::kReceive, on);
      if (!target.is(out)) out.attr("copy_")(target);
    };
    return py::cast(Receive(launches_, handle_state, receive));
  }

  // Launches a call without tokens, which publishes the fields of its plan. `results` is a tensor.
  void launch_empty(LowLatencyKind kind, const LowLatencyPlan& plan, const py::object& results,
                    const py::object& global_scale) {
    const std::shared_ptr<Passage> passage = passage_;
    const cudaStream_t stream = launches_.current();
    if (kind == LowLatencyKind::kDispatch) {
      LowLatencyDispatch call{};
      call.buffer_idx = passage->dispatches.next("low_latency_dispatch");
      call.global_scale = pointer<float>(address_of(global_scale));
      call.counter = passage->counter;
      call.results = pointer<int32_t>(address_of(results));
      launch(*passage, plan, call, Halves::kBoth, stream);
    } else {
      LowLatencyCombine call{};
      call.buffer_idx = passage->combines.next("low_latency_combine");
      call.results = pointer<int32_t>(address_of(results));
      call.min_tokens_to_sum = kNoSums;
      launch(*passage, plan, call, Halves::kBoth, stream);
    }
  }

 private:
  static BuffersInUse& buffers(Passage& passage, LowLatencyKind kind) {
    return kind == LowLatencyKind::kDispatch ? passage.dispatches : passage.combines;
  }

  // Throws where a combine does not fit the dispatch of its handle, or this buffer.
  void require_combine(const State& state, const py::object& topk_idx, const py::object& data, bool has_signals) const {
    const int num_tokens = size_of(topk_idx, 0), num_topk = size_of(topk_idx, 1);
    const auto as_list = [](int rows, int columns) {
      return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
    };
    if (num_tokens != state.num_tokens || num_topk != state.plan.shape.num_topk) {
      throw ConfigError("topk_idx.shape is " + as_list(num_tokens, num_topk) +
                        "; allowed: " + as_list(state.num_tokens, state.plan.shape.num_topk) + ", as dispatched");
    }
    if (!state.is_received) {
      throw ConfigError("handle is of a dispatch whose hook has not been called; allowed: calling it first");
    }
    if (!covers(state.plan)) {
      throw ConfigError("handle is of a dispatch that needs " + std::to_string(state.plan.capacity.region_bytes()) +
                        " bytes of low-latency memory, more than this buffer has; allowed: one that a dispatch of "
                        "this buffer returned");
    }
    // A copy would be made before the experts have written.
    const uintptr_t offset = has_signals ? address_of(data) % kRowAlignBytes : 0;
    if (offset != 0) {
      throw ConfigError("x.data_ptr() is " + std::to_string(offset) + " bytes after a multiple of " +
                        std::to_string(kRowAlignBytes) + "; allowed with overlap: a multiple");
    }
  }

  void launch(Passage& passage, const LowLatencyPlan& plan, const LowLatencyDispatch& call, Halves halves,
              cudaStream_t stream) {
    launches_.order().begin_low_latency(stream);
    passage.region.dispatch(plan, call, halves, stream);
    passage.dispatches.note(call.buffer_idx, halves);
    launches_.order().end();
  }
  void launch(Passage& passage, const LowLatencyPlan& plan, const LowLatencyCombine& call, Halves halves,
              cudaStream_t stream) {
    launches_.order().begin_low_latency(stream);
    passage.region.combine(plan, call, halves, stream);
    passage.combines.note(call.buffer_idx, halves);
    launches_.order().end();
  }

  OrderedLaunches& launches_;
  RouteMemory& results_;
  int num_ranks_, device_index_;
  TensorDevice device_;
  std::shared_ptr<Passage> passage_;
};

}  // namespace

void add_low_latency(py::module_& module) {
  py::enum_<LowLatencyKind>(module, "LowLatencyKind")
      .value("DISPATCH", LowLatencyKind::kDispatch)
      .value("COMBINE", LowLatencyKind::kCombine);
  py::class_<State>(module, "LowLatencyState")
      .def_readonly("plan", &State::plan)
      .def_readonly("memory", &State::memory)
      .def_readonly("chunk", &State::chunk)
      .def_readonly("results", &State::results)
      .def_readonly("stream", &State::stream)
      // src_info and layout_range of the handle.
      .def("__call__", [](const State& state) {
        return bindings::make_tables(state.plan, state.memory, state.results, state.device);
      });
  py::class_<Receive>(module, "LowLatencyReceive").def("__call__", &Receive::operator());
  py::class_<LowLatencyCalls>(module, "LowLatencyCalls")
      .def(py::init<const Communicator&, OrderedLaunches&, RouteMemory&, int, const py::object&, bool>(), py::kw_only(),
           py::arg("communicator"), py::arg("order"), py::arg("results"), py::arg("num_ranks"), py::arg("device"),
           py::arg("by_python") = false, py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>())
      .def("begin", &LowLatencyCalls::begin, py::arg("region"), py::arg("counter"))
      .def("covers", &LowLatencyCalls::covers, py::arg("plan"))
      .def("can_send", &LowLatencyCalls::can_send, py::arg("kind"))
      .def_property_readonly("are_in_flight", &LowLatencyCalls::are_in_flight)
      .def("plan_of", &LowLatencyCalls::plan_of, py::arg("request"), py::arg("format"))
      .def("dispatch", &LowLatencyCalls::dispatch, py::arg("request"), py::arg("format"))
      .def("combine", &LowLatencyCalls::combine, py::arg("request"), py::arg("state"))
      .def("launch_empty", &LowLatencyCalls::launch_empty, py::arg("kind"), py::arg("plan"), py::arg("results"),
           py::arg("global_scale") = py::none());
}

}  // namespace hybrid_ep::calls
