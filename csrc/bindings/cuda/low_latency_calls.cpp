// Low-latency calls that repeat an earlier one. Each is one call of C++, which takes a buffer and memory for the
// results, launches, and makes the tensors. Python opens this path when a call needs nothing else.
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/fast_call.h"
#include "bindings/cuda/low_latency.h"
#include "bindings/cuda/new_tensor.h"
#include "bindings/cuda/ordered_launches.h"
#include "bindings/cuda/route_memory.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

// Which buffers of one kind are in use: sent into and not yet received from.
class BuffersInUse {
 public:
  int next_idx() const { return next_idx_; }
  const std::array<bool, kLowLatencyBuffers>& in_flight() const { return in_flight_; }
  // Whether no call can be sent.
  bool are_in_flight() const { return in_flight_[next_idx_]; }
  // Each is called only once the launch has succeeded: the numbers of calls on the device count launches.
  void note_sent() {
    in_flight_[next_idx_] = true;
    note_done();
  }
  void note_received(int idx) { in_flight_.at(idx) = false; }
  // In place of the two, for a launch that sends and receives.
  void note_done() { next_idx_ = (next_idx_ + 1) % kLowLatencyBuffers; }

 private:
  int next_idx_ = 0;
  std::array<bool, kLowLatencyBuffers> in_flight_{};
};

// What calls use until it is replaced. A call keeps it, because Python may let another thread run in between.
struct Opened {
  LowLatencyRegion& region;
  BuffersInUse &dispatches, &combines;
  uint32_t counter;  // of the calls of the region
  py::tuple kept;    // the objects above
};

// One call that may be launched.
struct Launch {
  std::shared_ptr<const Opened> opened;
  BuffersInUse& buffers;
  cudaStream_t stream;  // the current one
};

// Whether a repeated call may be launched, and with what. Closed, none may.
class RepeatedCalls {
 public:
  RepeatedCalls(const Communicator& communicator, OrderedLaunches& launches)
      : communicator_(communicator), launches_(launches) {}

  void open(const py::object& region, const py::object& dispatches, const py::object& combines, uint32_t counter) {
    opened_ = std::make_shared<Opened>(Opened{region.cast<LowLatencyRegion&>(), dispatches.cast<BuffersInUse&>(),
                                              combines.cast<BuffersInUse&>(), counter,
                                              py::make_tuple(region, dispatches, combines)});
  }
  void close() { opened_.reset(); }
  bool is_open() const { return opened_ != nullptr; }

  // Must live as long as a call. Where another thread is in one, Python refuses the call.
  OneCall begin_call() const { return launches_.begin_call(); }
  // Begins a call on the current stream. nullopt: no call of this kind may be launched. After a fault the masks may
  // have to change first.
  std::optional<Launch> begin(const LowLatencyPlan& plan, LowLatencyKind kind) const {
    if (!is_open() || communicator_.has_fault()) return std::nullopt;
    BuffersInUse& buffers = kind == LowLatencyKind::kDispatch ? opened_->dispatches : opened_->combines;
    if (buffers.are_in_flight() || !opened_->region.covers(plan)) return std::nullopt;
    const cudaStream_t stream = launches_.current();
    if (opened_->region.is_capturing(stream)) return std::nullopt;
    launches_.order().begin_low_latency(stream);
    return Launch{opened_, buffers, stream};
  }
  // Begins the receive of a launch. Returns false where it may not follow, or not on the stream of its send.
  bool begin_receive(const Launch& sent) const {
    const cudaStream_t stream = launches_.current();
    if (sent.opened != opened_ || sent.stream != stream || opened_->region.is_capturing(stream)) return false;
    launches_.order().begin_low_latency(stream);
    return true;
  }
  // Must be called after each launch. Returns whether a kernel has reported a fault.
  bool end() const {
    launches_.order().end();
    return communicator_.has_fault();
  }

  int device() const { return communicator_.device(); }

 private:
  const Communicator& communicator_;
  OrderedLaunches& launches_;
  std::shared_ptr<const Opened> opened_;
};

// What the engine keeps in a handle.
struct State {
  py::object plan;  // the LowLatencyPlan of hybrid_ep/engine/cuda/plan.py
  int num_tokens;
  py::object chunk;  // the memory that the results beside the rows are a piece of
  uintptr_t results, stream;
  bool is_received;
};

// The calls of one shape. `engine` is the CudaLowLatency whose calls they are.
struct RepeatedShape {
  const RepeatedCalls& calls;
  py::object engine;
  bool has_hook;
  bool holds_overflow;  // as CudaLowLatency.end_call takes it

  // What raises the fault that a kernel has reported; None: the engine knows it.
  py::object end_call() const { return engine.attr("end_call")(py::arg("holds_overflow") = holds_overflow); }
  // Ends a call without a hook. `buffer` is what the caller has called.
  void end(const py::object& buffer) const {
    if (!calls.end()) return;
    const py::object raise_fault = end_call();
    if (!raise_fault.is_none()) buffer.attr("_receive")(raise_fault);
  }
};

// Rows that experts have received, added to statistics of the caller; or nothing.
struct CountsToAdd {
  py::object counts, stats;

  void add() const {
    static PyObject* const name = PyUnicode_InternFromString("add_");
    if (stats.is_none()) return;
    const auto done = py::reinterpret_steal<py::object>(PyObject_CallMethodOneArg(stats.ptr(), name, counts.ptr()));
    if (!done) throw py::error_already_set();
  }
};

// Receives what a call with a hook has sent.
class ReceiveHook {
 public:
  using Receive = std::function<void(cudaStream_t)>;

  // `sent` has been launched by a call of `buffer`, into its buffer `idx`. `state` is a State. `kept` are the tensors
  // that `receive` uses.
  ReceiveHook(const RepeatedShape& shape, const Launch& sent, py::object buffer, int idx, Receive receive,
              py::object state, CountsToAdd counts, py::tuple kept)
      : shape_(shape),
        sent_(sent),
        buffer_(std::move(buffer)),
        idx_(idx),
        num_cleanings_(num_cleanings()),
        receive_(std::move(receive)),
        state_(std::move(state)),
        counts_(std::move(counts)),
        kept_(std::move(kept)) {}

  // What the caller calls, once.
  py::object call(FastArguments) {
    ++num_calls_;
    if (num_calls_ != 1 || num_cleanings() != num_cleanings_ || !receive_at_once()) {
      buffer_.attr("_receive_late")(py::cast(this).attr("finish"), num_calls_, num_cleanings_);
    }
    return py::none();
  }

  // As the `finish` of LowLatencyDispatched.
  void finish() {
    if (receive_at_once()) return;
    if (!has_launched_) {
      const py::cpp_function receive([this](uintptr_t stream) { receive_(stream_of(stream)); });
      shape_.engine.attr("receive_in_steps")(receive, py::cast(&sent_.buffers), idx_, state_, shape_.holds_overflow);
    } else {
      const py::object raise_fault = shape_.end_call();
      if (!raise_fault.is_none()) raise_fault();
    }
    counts_.add();
  }

 private:
  int64_t num_cleanings() const { return buffer_.attr(num_cleanings_name()).cast<int64_t>(); }
  static py::handle num_cleanings_name() {
    static PyObject* const name = PyUnicode_InternFromString("_num_cleanings");
    return name;
  }

  // Receives, if nothing else is to be done. Returns whether it has, and no kernel has reported a fault.
  bool receive_at_once() {
    if (has_launched_ || !shape_.calls.begin_receive(sent_)) return false;
    receive_(sent_.stream);
    has_launched_ = true;
    sent_.buffers.note_received(idx_);
    state_.cast<State&>().is_received = true;
    if (shape_.calls.end()) return false;
    counts_.add();
    return true;
  }

  RepeatedShape shape_;
  Launch sent_;
  py::object buffer_;
  int idx_, num_calls_ = 0;
  int64_t num_cleanings_;
  Receive receive_;
  bool has_launched_ = false;
  py::object state_;
  CountsToAdd counts_;
  py::tuple kept_;
};

// What callers get as the hook.
py::object hook_of(ReceiveHook&& hook) { return fast_call<&ReceiveHook::call, 0>(py::cast(std::move(hook))); }

// Makes the handles of a dispatch without their `__init__`, which would take as long as the tensors.
class HandleMaker {
 public:
  // `type` is LowLatencyHandle; `sizes` are M, H and E.
  HandleMaker(py::object type, const py::tuple& sizes, py::object grid)
      : type_(std::move(type)), fields_{sizes[0], sizes[1], sizes[2], std::move(grid)} {}

  py::object make(const py::object& memory, const py::object& state) const {
    static const std::array<PyObject*, 7> names = [] {
      std::array<PyObject*, 7> found{};
      const char* const texts[] = {
          "num_max_tokens_per_rank", "hidden", "num_experts", "grid", "memory", "state", "_tables"};
      for (size_t i = 0; i < found.size(); ++i) found[i] = PyUnicode_InternFromString(texts[i]);
      return found;
    }();
    auto* const type = reinterpret_cast<PyTypeObject*>(type_.ptr());
    auto made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
    const std::array<py::handle, 7> values{fields_[0], fields_[1], fields_[2], fields_[3], memory, state, state};
    for (size_t i = 0; made && i < names.size(); ++i) {
      if (PyObject_SetAttr(made.ptr(), names[i], values[i].ptr()) != 0) throw py::error_already_set();
    }
    if (!made) throw py::error_already_set();
    return made;
  }

 private:
  py::object type_;
  std::array<py::object, 4> fields_;
};

class RepeatedDispatch {
 public:
  // A dispatch of `num_tokens` fills plan.num_ints of `results` beside its rows. Rows without scales have no
  // `make_scales`.
  RepeatedDispatch(const RepeatedCalls& calls, py::object engine, bool has_hook, py::object plan, int num_tokens,
                   const NewTensor& make_rows, const std::optional<NewTensor>& make_scales, RouteMemory& results,
                   py::object handle_type, py::object grid)
      : shape_{calls, std::move(engine), has_hook, /*holds_overflow=*/true},
        plan_(std::move(plan)),
        native_(plan_.attr("native").cast<const LowLatencyPlan&>()),
        num_tokens_(num_tokens),
        num_ints_(plan_.attr("num_ints").cast<int64_t>()),
        make_rows_(make_rows),
        make_scales_(make_scales),
        results_(results),
        make_handle_(std::move(handle_type), plan_.attr("sizes"), std::move(grid)) {}

  // Takes the buffer that is called, which has the methods of LowLatencyCalls, rows, top-k indices, statistics of rows
  // and of waits, and the global scale. Returns rows, scales, counts, the handle and the hook. None: the call has not
  // been made.
  py::object call(FastArguments arguments) const {
    const OneCall one_call = shape_.calls.begin_call();
    if (!one_call.is_begun()) return py::none();
    const auto buffer = py::reinterpret_borrow<py::object>(arguments[0]);
    const uintptr_t rows = address_of(arguments[1]), topk_idx = address_of(arguments[2]);
    const auto stats = py::reinterpret_borrow<py::object>(arguments[3]);
    const auto wait_stats = py::reinterpret_borrow<py::object>(arguments[4]);
    const uintptr_t global_scale = address_of(arguments[5]);
    const std::optional<Launch> launch = shape_.calls.begin(native_, LowLatencyKind::kDispatch);
    if (!launch || rows % kRowAlignBytes != 0) return py::none();
    const auto stream = reinterpret_cast<uintptr_t>(launch->stream);
    // Before tensors are made: torch may let another thread call meanwhile.
    const auto [chunk, memory, results] = results_.take(num_ints_, stream, /*alone=*/false);
    uintptr_t received_at = 0, scales_at = 0;
    const py::object received = make_rows_.make(&received_at);
    const py::object scales = make_scales_ ? make_scales_->make(&scales_at) : py::none();
    if (launch->buffers.are_in_flight()) return py::none();  // by sends of another thread
    LowLatencyRegion& region = launch->opened->region;
    const int idx = launch->buffers.next_idx();
    const TokensOut out = tokens_out(rows, topk_idx, num_tokens_, global_scale, launch->opened->counter);
    const TokensIn in = tokens_in(received_at, scales_at, address_of(wait_stats));
    auto* const tables = pointer<int32_t>(results);
    // What Python needs is made after the launch, beside the kernel.
    if (shape_.has_hook) {
      region.send_tokens(native_, idx, out, tables, launch->stream);
      launch->buffers.note_sent();
      shape_.calls.end();  // a fault is left to the receive
    } else {
      region.dispatch_tokens(native_, idx, out, in, tables, launch->stream);
      launch->buffers.note_done();
    }
    const py::object state = py::cast(State{plan_, num_tokens_, chunk, results, stream, !shape_.has_hook});
    const CountsToAdd counts{make_counts(native_, memory, results, shape_.calls.device()), stats};
    py::object hook = py::none();
    if (shape_.has_hook) {
      const auto receive = [&region, plan = native_, idx, in, tables](cudaStream_t on) {
        region.receive_tokens(plan, idx, in, tables, on);
      };
      const py::tuple kept = py::make_tuple(received, scales, wait_stats);
      hook = hook_of(ReceiveHook(shape_, *launch, buffer, idx, receive, state, counts, kept));
    } else {
      shape_.end(buffer);
      counts.add();
    }
    return py::make_tuple(received, scales, counts.counts, make_handle_.make(memory, state), hook);
  }

 private:
  RepeatedShape shape_;
  py::object plan_;
  LowLatencyPlan native_;
  int num_tokens_;
  int64_t num_ints_;
  NewTensor make_rows_;
  std::optional<NewTensor> make_scales_;
  RouteMemory& results_;
  HandleMaker make_handle_;
};

class RepeatedCombine {
 public:
  // Combines of `num_tokens` × `num_topk` routes.
  RepeatedCombine(const RepeatedCalls& calls, py::object engine, bool has_hook, int num_tokens, int num_topk,
                  const NewTensor& make_out, bool use_logfmt, int min_tokens_to_sum)
      : shape_{calls, std::move(engine), has_hook, /*holds_overflow=*/false},
        num_tokens_(num_tokens),
        num_topk_(num_topk),
        make_out_(make_out),
        use_logfmt_(use_logfmt),
        min_tokens_to_sum_(min_tokens_to_sum) {}

  // Takes the buffer that is called, rows, top-k indices, weights, the handle, the tensor to write to (None: a new
  // one), and statistics of waits. Returns the result and the hook. None: the call has not been made.
  py::object call(FastArguments arguments) const {
    const OneCall one_call = shape_.calls.begin_call();
    if (!one_call.is_begun()) return py::none();
    static PyObject* const name = PyUnicode_InternFromString("state");
    const auto buffer = py::reinterpret_borrow<py::object>(arguments[0]);
    const uintptr_t rows = address_of(arguments[1]);
    const auto topk_idx = py::reinterpret_borrow<py::object>(arguments[2]);
    const auto topk_weights = py::reinterpret_borrow<py::object>(arguments[3]);
    const py::object held = py::handle(arguments[4]).attr(name);
    auto out = py::reinterpret_borrow<py::object>(arguments[5]);
    const auto wait_stats = py::reinterpret_borrow<py::object>(arguments[6]);
    if (!py::isinstance<State>(held)) return py::none();
    const auto& state = held.cast<const State&>();
    const auto& plan = native_of(state);
    if (!state.is_received || state.num_tokens != num_tokens_ || plan.shape.num_topk != num_topk_) return py::none();
    const std::optional<Launch> launch = shape_.calls.begin(plan, LowLatencyKind::kCombine);
    const uintptr_t weights_at = address_of(topk_weights);
    uintptr_t out_at = address_of(out);
    const bool is_aligned = (rows | weights_at | out_at) % kRowAlignBytes == 0;
    if (!launch || launch->stream != stream_of(state.stream) || !is_aligned) return py::none();
    if (out.is_none()) out = make_out_.make(&out_at);
    if (launch->buffers.are_in_flight()) return py::none();  // as above
    LowLatencyRegion& region = launch->opened->region;
    const int idx = launch->buffers.next_idx();
    const uintptr_t results = state.results;
    const RowsHome home = rows_home(rows, results, weights_at, num_tokens_, use_logfmt_);
    const RowsToSum to_sum = rows_to_sum(results, address_of(topk_idx), weights_at, out_at, num_tokens_, use_logfmt_);
    auto* const waits = pointer<int64_t>(address_of(wait_stats));
    py::object hook = py::none();
    if (shape_.has_hook) {
      region.return_rows(plan, idx, home, min_tokens_to_sum_, waits, launch->stream);
      const auto receive = [&region, plan, idx, to_sum, waits](cudaStream_t on) {
        region.sum_rows(plan, idx, to_sum, waits, on);
      };
      launch->buffers.note_sent();
      shape_.calls.end();  // as above
      const py::tuple kept = py::make_tuple(topk_idx, topk_weights, out, wait_stats);
      hook = hook_of(ReceiveHook(shape_, *launch, buffer, idx, receive, held, {py::none(), py::none()}, kept));
    } else {
      region.combine_rows(plan, idx, home, min_tokens_to_sum_, to_sum, waits, launch->stream);
      launch->buffers.note_done();
      shape_.end(buffer);
    }
    return py::make_tuple(out, hook);
  }

 private:
  static const LowLatencyPlan& native_of(const State& state) {
    static PyObject* const name = PyUnicode_InternFromString("native");
    return state.plan.attr(name).cast<const LowLatencyPlan&>();
  }

  RepeatedShape shape_;
  int num_tokens_, num_topk_;
  NewTensor make_out_;
  bool use_logfmt_;
  int min_tokens_to_sum_;
};

}  // namespace

void add_low_latency_calls(py::module_& module) {
  py::class_<BuffersInUse>(module, "LowLatencyBuffers")
      .def(py::init<>())
      .def_property_readonly("next_idx", &BuffersInUse::next_idx)
      .def_property_readonly("in_flight", &BuffersInUse::in_flight)
      .def_property_readonly("are_in_flight", &BuffersInUse::are_in_flight)
      .def("note_sent", &BuffersInUse::note_sent)
      .def("note_received", &BuffersInUse::note_received, py::arg("idx"))
      .def("note_done", &BuffersInUse::note_done);
  py::class_<RepeatedCalls>(module, "RepeatedLowLatencyCalls")
      .def(py::init<const Communicator&, OrderedLaunches&>(), py::arg("communicator"), py::arg("order"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("open", &RepeatedCalls::open, py::arg("region"), py::arg("dispatches"), py::arg("combines"),
           py::arg("counter"))
      .def("close", &RepeatedCalls::close)
      .def_property_readonly("is_open", &RepeatedCalls::is_open);
  py::class_<State>(module, "LowLatencyState")
      .def(py::init([](py::object plan, int num_tokens, py::object chunk, uintptr_t results, uintptr_t stream) {
             return State{std::move(plan), num_tokens, std::move(chunk), results, stream, false};
           }),
           py::arg("plan"), py::arg("num_tokens"), py::arg("chunk"), py::arg("results"), py::arg("stream"))
      .def_readonly("plan", &State::plan)
      .def_readonly("num_tokens", &State::num_tokens)
      .def_readonly("chunk", &State::chunk)
      .def_readonly("results", &State::results)
      .def_readonly("stream", &State::stream)
      .def_readwrite("is_received", &State::is_received)
      // src_info and layout_range of the handle.
      .def("__call__", [](const State& state) {
        const py::object memory = state.chunk.attr("memory");
        return state.plan.attr("native").attr("tables")(memory, state.results, memory.attr("device").attr("index"));
      });
  py::class_<ReceiveHook>(module, "LowLatencyReceiveHook").def("finish", &ReceiveHook::finish);
  py::class_<RepeatedDispatch>(module, "RepeatedLowLatencyDispatch")
      .def(py::init<const RepeatedCalls&, py::object, bool, py::object, int, const NewTensor&,
                    const std::optional<NewTensor>&, RouteMemory&, py::object, py::object>(),
           py::arg("calls"), py::arg("engine"), py::arg("has_hook"), py::arg("plan"), py::arg("num_tokens"),
           py::arg("make_rows"), py::arg("make_scales"), py::arg("results"), py::arg("handle_type"), py::arg("grid"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 9>())
      .def_property_readonly("call", &fast_call<&RepeatedDispatch::call, 6>);
  py::class_<RepeatedCombine>(module, "RepeatedLowLatencyCombine")
      .def(py::init<const RepeatedCalls&, py::object, bool, int, int, const NewTensor&, bool, int>(), py::arg("calls"),
           py::arg("engine"), py::arg("has_hook"), py::arg("num_tokens"), py::arg("num_topk"), py::arg("make_out"),
           py::arg("use_logfmt"), py::arg("min_tokens_to_sum"), py::keep_alive<1, 2>())
      .def_property_readonly("call", &fast_call<&RepeatedCombine::call, 7>);
}

}  // namespace hybrid_ep::bindings
