// Low-latency calls that repeat an earlier one. Each is one call of C++, which takes a buffer and memory for the
// results, launches, and makes the tensors. Python opens this path when a call needs nothing else.
#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/low_latency.h"
#include "bindings/cuda/new_tensor.h"
#include "common/cuda_check.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

constexpr int64_t kResultsAlignBytes = 128;  // a cache line
constexpr int kResultsAtOnce = 16;           // dispatches whose memory is taken together

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
  uintptr_t stream;  // the current one
};

// Whether a repeated call may be launched, and with what. Closed, none may.
class RepeatedCalls {
 public:
  // `order` is a LaunchOrder. `current_stream` returns the calling thread's stream as an integer.
  RepeatedCalls(const Communicator& communicator, py::object order, py::object current_stream)
      : communicator_(communicator), order_(std::move(order)), current_stream_(std::move(current_stream)) {}

  void open(const py::object& region, const py::object& dispatches, const py::object& combines, uint32_t counter) {
    opened_ = std::make_shared<Opened>(Opened{region.cast<LowLatencyRegion&>(), dispatches.cast<BuffersInUse&>(),
                                              combines.cast<BuffersInUse&>(), counter,
                                              py::make_tuple(region, dispatches, combines)});
  }
  void close() { opened_.reset(); }
  bool is_open() const { return opened_ != nullptr; }

  // nullopt: no call of this kind may be launched on the current stream.
  std::optional<Launch> begin(const LowLatencyPlan& plan, LowLatencyKind kind) const {
    if (!is_open()) return std::nullopt;
    BuffersInUse& buffers = kind == LowLatencyKind::kDispatch ? opened_->dispatches : opened_->combines;
    if (buffers.are_in_flight() || !opened_->region.covers(plan)) return std::nullopt;
    const auto free_stream = order_.attr("free_stream").cast<std::optional<uintptr_t>>();
    const auto stream = current_stream_(device()).cast<uintptr_t>();
    if (free_stream != stream || opened_->region.is_capturing(stream_of(stream))) return std::nullopt;
    return Launch{opened_, buffers, stream};
  }
  // Must be called after the launch. Returns whether a kernel has reported a fault.
  bool end(const Launch& launch) const {
    launch.buffers.note_done();
    if (const auto event = order_.attr("free_event").cast<std::optional<uintptr_t>>()) {
      check_cuda(cudaEventRecord(reinterpret_cast<cudaEvent_t>(*event), stream_of(launch.stream)), "cudaEventRecord");
    }
    return communicator_.has_fault();
  }

  int device() const { return communicator_.device(); }

 private:
  const Communicator& communicator_;
  py::object order_, current_stream_;
  std::shared_ptr<const Opened> opened_;
};

// Dispatches of one shape without a hook.
class RepeatedDispatch {
 public:
  // A dispatch fills `num_ints` beside its rows. Rows without scales have no `make_scales`. `take` is RouteMemory.take.
  RepeatedDispatch(const RepeatedCalls& calls, const LowLatencyPlan& plan, int num_tokens, int64_t num_ints,
                   const NewTensor& make_rows, const std::optional<NewTensor>& make_scales, py::object take)
      : calls_(calls),
        plan_(plan),
        num_tokens_(num_tokens),
        results_bytes_((num_ints * static_cast<int64_t>(sizeof(int32_t)) + kResultsAlignBytes - 1) /
                       kResultsAlignBytes * kResultsAlignBytes),
        make_rows_(make_rows),
        make_scales_(make_scales),
        take_(std::move(take)) {}

  // Returns rows, scales, counts, the chunk and the address of the results, the stream, and whether a kernel has
  // reported a fault. None: the call has not been made.
  py::object call(Address rows, Address topk_idx, Address global_scale, Address wait_stats) {
    const std::optional<Launch> launch = calls_.begin(plan_, LowLatencyKind::kDispatch);
    if (!launch || rows % kRowAlignBytes != 0) return py::none();
    const uintptr_t stream = launch->stream;
    if (num_left_ == 0 || stream != stream_) take_results(stream);
    // Before tensors are made: torch may let another thread call meanwhile.
    const py::object chunk = chunk_, memory = memory_;
    const uintptr_t results = std::exchange(results_, results_ + results_bytes_);
    --num_left_;
    uintptr_t received_at = 0, scales_at = 0;
    const py::object received = make_rows_.make(&received_at);
    const py::object scales = make_scales_ ? make_scales_->make(&scales_at) : py::none();
    launch->opened->region.dispatch_tokens(
        plan_, launch->buffers.next_idx(),
        tokens_out(rows, topk_idx, num_tokens_, global_scale, launch->opened->counter),
        tokens_in(received_at, scales_at, wait_stats), pointer<int32_t>(results), stream_of(stream));
    const bool has_fault = calls_.end(*launch);
    const py::object counts = make_counts(plan_, memory, results, calls_.device());
    return py::make_tuple(received, scales, counts, chunk, results, stream, has_fault);
  }

 private:
  void take_results(uintptr_t stream) {
    const int64_t num_ints = kResultsAtOnce * results_bytes_ / static_cast<int64_t>(sizeof(int32_t));
    const py::tuple taken = take_(num_ints, stream, py::arg("alone") = false);
    chunk_ = taken[0];
    memory_ = chunk_.attr("memory");
    results_ = taken[1].cast<uintptr_t>();
    num_left_ = kResultsAtOnce;
    stream_ = stream;
  }

  const RepeatedCalls& calls_;
  LowLatencyPlan plan_;
  int num_tokens_;
  int64_t results_bytes_;
  NewTensor make_rows_;
  std::optional<NewTensor> make_scales_;
  py::object take_;
  // What the next dispatches on `stream_` fill.
  py::object chunk_, memory_;
  uintptr_t results_ = 0, stream_ = 0;
  int num_left_ = 0;
};

// Makes a combine without a hook, if the current stream is `stream`. Returns the result, and whether a kernel has
// reported a fault; None: the call has not been made. `results` are those of the dispatch. `out` is the tensor to write
// to; None: a new one.
py::object combine(const RepeatedCalls& calls, const LowLatencyPlan& plan, Address rows, Address results,
                   Address topk_idx, Address topk_weights, py::object out, const NewTensor& make_out, int num_tokens,
                   bool use_logfmt, int min_tokens_to_sum, Address wait_stats, uintptr_t stream) {
  const std::optional<Launch> launch = calls.begin(plan, LowLatencyKind::kCombine);
  uintptr_t out_at = address_of(out);
  const bool is_aligned = (rows | topk_weights | out_at) % kRowAlignBytes == 0;
  if (!launch || launch->stream != stream || !is_aligned) return py::none();
  if (out.is_none()) out = make_out.make(&out_at);
  launch->opened->region.combine_rows(plan, launch->buffers.next_idx(),
                                      rows_home(rows, results, topk_weights, num_tokens, use_logfmt), min_tokens_to_sum,
                                      rows_to_sum(results, topk_idx, topk_weights, out_at, num_tokens, use_logfmt),
                                      pointer<int64_t>(wait_stats), stream_of(stream));
  return py::make_tuple(out, calls.end(*launch));
}

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
      .def(py::init<const Communicator&, py::object, py::object>(), py::arg("communicator"), py::arg("order"),
           py::arg("current_stream"), py::keep_alive<1, 2>())
      .def("open", &RepeatedCalls::open, py::arg("region"), py::arg("dispatches"), py::arg("combines"),
           py::arg("counter"))
      .def("close", &RepeatedCalls::close)
      .def_property_readonly("is_open", &RepeatedCalls::is_open)
      .def("combine", &combine, py::arg("plan"), py::arg("rows"), py::arg("results"), py::arg("topk_idx"),
           py::arg("topk_weights"), py::arg("out"), py::arg("make_out"), py::arg("num_tokens"), py::arg("use_logfmt"),
           py::arg("min_tokens_to_sum"), py::arg("wait_stats"), py::arg("stream"));
  py::class_<RepeatedDispatch>(module, "RepeatedLowLatencyDispatch")
      .def(py::init<const RepeatedCalls&, const LowLatencyPlan&, int, int64_t, const NewTensor&,
                    const std::optional<NewTensor>&, py::object>(),
           py::arg("calls"), py::arg("plan"), py::arg("num_tokens"), py::arg("num_ints"), py::arg("make_rows"),
           py::arg("make_scales"), py::arg("take"), py::keep_alive<1, 2>())
      .def("__call__", &RepeatedDispatch::call, py::arg("rows"), py::arg("topk_idx"), py::arg("global_scale"),
           py::arg("wait_stats"));
}

}  // namespace hybrid_ep::bindings
