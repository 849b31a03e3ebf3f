// Low-latency calls that repeat an earlier one. Each is one call of C++, which takes a buffer and memory for the
// results, launches, and makes the tensors. Python opens this path when a call needs nothing else.
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/cuda/address.h"
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

// The calls of one shape. `engine` is the CudaLowLatency whose calls they are.
struct RepeatedShape {
  const RepeatedCalls& calls;
  py::object engine;
  bool has_hook;
  bool holds_overflow;  // as CudaLowLatency.end_call takes it

  // What raises the fault that a kernel has reported; None: the engine knows it.
  py::object end_call() const { return engine.attr("end_call")(py::arg("holds_overflow") = holds_overflow); }
};

// Receives what a call with a hook has sent.
class ReceiveHook {
 public:
  using Receive = std::function<void(cudaStream_t)>;

  // `sent` has been launched, into the buffer `idx`. `state` is the LowLatencyState of the dispatch. `kept` are the
  // tensors that `receive` uses.
  ReceiveHook(const RepeatedShape& shape, const Launch& sent, int idx, Receive receive, py::object state,
              py::tuple kept)
      : shape_(shape),
        sent_(sent),
        idx_(idx),
        receive_(std::move(receive)),
        state_(std::move(state)),
        kept_(std::move(kept)) {}

  // Receives, if nothing else is to be done. Returns whether it has, and no kernel has reported a fault. After false
  // the hook must be called, too.
  bool at_once() {
    if (has_launched_ || !shape_.calls.begin_receive(sent_)) return false;
    receive_(sent_.stream);
    has_launched_ = true;
    sent_.buffers.note_received(idx_);
    state_.attr("is_received") = true;
    return !shape_.calls.end();
  }

  void call() {
    if (at_once()) return;
    if (!has_launched_) {
      const py::cpp_function receive([this](uintptr_t stream) { receive_(stream_of(stream)); });
      shape_.engine.attr("receive_in_steps")(receive, py::cast(&sent_.buffers), idx_, state_, shape_.holds_overflow);
      return;
    }
    const py::object raise_fault = shape_.end_call();
    if (!raise_fault.is_none()) raise_fault();
  }

 private:
  RepeatedShape shape_;
  Launch sent_;
  int idx_;
  Receive receive_;
  bool has_launched_ = false;
  py::object state_;
  py::tuple kept_;
};

class RepeatedDispatch {
 public:
  // A dispatch fills `num_ints` of `results` beside its rows. Rows without scales have no `make_scales`. `make_state`
  // makes a LowLatencyState of a chunk, an address of results, a stream, and whether rows are received.
  RepeatedDispatch(const RepeatedCalls& calls, py::object engine, bool has_hook, const LowLatencyPlan& plan,
                   int num_tokens, int64_t num_ints, const NewTensor& make_rows,
                   const std::optional<NewTensor>& make_scales, RouteMemory& results, py::object make_state)
      : shape_{calls, std::move(engine), has_hook, /*holds_overflow=*/true},
        plan_(plan),
        num_tokens_(num_tokens),
        num_ints_(num_ints),
        make_rows_(make_rows),
        make_scales_(make_scales),
        results_(results),
        make_state_(std::move(make_state)) {}

  // Returns rows, scales, counts, the memory of the results, the state, and `finish` as the engine does. None: the call
  // has not been made.
  py::object call(Address rows, Address topk_idx, Address global_scale, const py::object& wait_stats) {
    const std::optional<Launch> launch = shape_.calls.begin(plan_, LowLatencyKind::kDispatch);
    if (!launch || rows % kRowAlignBytes != 0) return py::none();
    const auto stream = reinterpret_cast<uintptr_t>(launch->stream);
    // Before tensors are made: torch may let another thread call meanwhile.
    const auto [chunk, memory, results] = results_.take(num_ints_, stream, /*alone=*/false);
    uintptr_t received_at = 0, scales_at = 0;
    const py::object received = make_rows_.make(&received_at);
    const py::object scales = make_scales_ ? make_scales_->make(&scales_at) : py::none();
    const py::object state = make_state_(chunk, results, stream, !shape_.has_hook);
    if (launch->buffers.are_in_flight()) return py::none();  // by sends of another thread
    LowLatencyRegion& region = launch->opened->region;
    const int idx = launch->buffers.next_idx();
    const TokensOut out = tokens_out(rows, topk_idx, num_tokens_, global_scale, launch->opened->counter);
    const TokensIn in = tokens_in(received_at, scales_at, address_of(wait_stats));
    auto* const tables = pointer<int32_t>(results);
    py::object finish = py::none();
    if (shape_.has_hook) {
      region.send_tokens(plan_, idx, out, tables, launch->stream);
      const auto receive = [&region, plan = plan_, idx, in, tables](cudaStream_t on) {
        region.receive_tokens(plan, idx, in, tables, on);
      };
      launch->buffers.note_sent();
      shape_.calls.end();  // a fault is left to the receive
      const py::tuple kept = py::make_tuple(received, scales, wait_stats);
      finish = py::cast(ReceiveHook(shape_, *launch, idx, receive, state, kept));
    } else {
      region.dispatch_tokens(plan_, idx, out, in, tables, launch->stream);
      launch->buffers.note_done();
      if (shape_.calls.end()) finish = shape_.end_call();
    }
    const py::object counts = make_counts(plan_, memory, results, shape_.calls.device());
    return py::make_tuple(received, scales, counts, memory, state, finish);
  }

 private:
  RepeatedShape shape_;
  LowLatencyPlan plan_;
  int num_tokens_;
  int64_t num_ints_;
  NewTensor make_rows_;
  std::optional<NewTensor> make_scales_;
  RouteMemory& results_;
  py::object make_state_;
};

class RepeatedCombine {
 public:
  RepeatedCombine(const RepeatedCalls& calls, py::object engine, bool has_hook, const NewTensor& make_out,
                  bool use_logfmt, int min_tokens_to_sum)
      : shape_{calls, std::move(engine), has_hook, /*holds_overflow=*/false},
        make_out_(make_out),
        use_logfmt_(use_logfmt),
        min_tokens_to_sum_(min_tokens_to_sum) {}

  // Makes a combine if the current stream is `stream`, that of the dispatch. Returns the result, and `finish` as the
  // engine does. None: the call has not been made. `results` and `state` are those of the dispatch. `out` is the tensor
  // to write to; None: a new one.
  py::object call(const LowLatencyPlan& plan, Address rows, Address results, const py::object& topk_idx,
                  const py::object& topk_weights, py::object out, int num_tokens, const py::object& wait_stats,
                  uintptr_t stream, const py::object& state) const {
    const std::optional<Launch> launch = shape_.calls.begin(plan, LowLatencyKind::kCombine);
    const uintptr_t weights_at = address_of(topk_weights);
    uintptr_t out_at = address_of(out);
    const bool is_aligned = (rows | weights_at | out_at) % kRowAlignBytes == 0;
    if (!launch || launch->stream != stream_of(stream) || !is_aligned) return py::none();
    if (out.is_none()) out = make_out_.make(&out_at);
    if (launch->buffers.are_in_flight()) return py::none();  // as above
    LowLatencyRegion& region = launch->opened->region;
    const int idx = launch->buffers.next_idx();
    const RowsHome home = rows_home(rows, results, weights_at, num_tokens, use_logfmt_);
    const RowsToSum to_sum = rows_to_sum(results, address_of(topk_idx), weights_at, out_at, num_tokens, use_logfmt_);
    auto* const waits = pointer<int64_t>(address_of(wait_stats));
    py::object finish = py::none();
    if (shape_.has_hook) {
      region.return_rows(plan, idx, home, min_tokens_to_sum_, waits, stream_of(stream));
      const auto receive = [&region, plan, idx, to_sum, waits](cudaStream_t on) {
        region.sum_rows(plan, idx, to_sum, waits, on);
      };
      launch->buffers.note_sent();
      shape_.calls.end();  // as above
      const py::tuple kept = py::make_tuple(topk_idx, topk_weights, out, wait_stats);
      finish = py::cast(ReceiveHook(shape_, *launch, idx, receive, state, kept));
    } else {
      region.combine_rows(plan, idx, home, min_tokens_to_sum_, to_sum, waits, stream_of(stream));
      launch->buffers.note_done();
      if (shape_.calls.end()) finish = shape_.end_call();
    }
    return py::make_tuple(out, finish);
  }

 private:
  RepeatedShape shape_;
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
  py::class_<ReceiveHook>(module, "LowLatencyReceiveHook")
      .def("at_once", &ReceiveHook::at_once)
      .def("__call__", &ReceiveHook::call);
  py::class_<RepeatedDispatch>(module, "RepeatedLowLatencyDispatch")
      .def(py::init<const RepeatedCalls&, py::object, bool, const LowLatencyPlan&, int, int64_t, const NewTensor&,
                    const std::optional<NewTensor>&, RouteMemory&, py::object>(),
           py::arg("calls"), py::arg("engine"), py::arg("has_hook"), py::arg("plan"), py::arg("num_tokens"),
           py::arg("num_ints"), py::arg("make_rows"), py::arg("make_scales"), py::arg("results"), py::arg("make_state"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 10>())
      .def("__call__", &RepeatedDispatch::call, py::arg("rows"), py::arg("topk_idx"), py::arg("global_scale"),
           py::arg("wait_stats"));
  py::class_<RepeatedCombine>(module, "RepeatedLowLatencyCombine")
      .def(py::init<const RepeatedCalls&, py::object, bool, const NewTensor&, bool, int>(), py::arg("calls"),
           py::arg("engine"), py::arg("has_hook"), py::arg("make_out"), py::arg("use_logfmt"),
           py::arg("min_tokens_to_sum"), py::keep_alive<1, 2>())
      .def("__call__", &RepeatedCombine::call, py::arg("plan"), py::arg("rows"), py::arg("results"),
           py::arg("topk_idx"), py::arg("topk_weights"), py::arg("out"), py::arg("num_tokens"), py::arg("wait_stats"),
           py::arg("stream"), py::arg("state"));
}

}  // namespace hybrid_ep::bindings
