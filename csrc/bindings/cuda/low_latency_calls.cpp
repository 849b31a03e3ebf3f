// Low-latency calls that repeat an earlier one, each in one call of C++. It takes a buffer and memory for the results,
// launches, and makes the tensors. Python decides when that is all there is to do.
#include <array>
#include <optional>
#include <utility>

#include "bindings/cuda/address.h"
#include "bindings/cuda/low_latency.h"
#include "common/cuda_check.h"

namespace hybrid_ep::bindings {
namespace py = pybind11;
namespace {

constexpr int64_t kResultsAlignBytes = 128;  // a cache line
constexpr int kResultsAtOnce = 16;           // of so many dispatches memory is taken together

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

// What a repeated call uses. Closed, there is none, and no call is made.
class RepeatedCalls {
 public:
  // `order` is a LaunchOrder. `current_stream` returns the calling thread's stream as an integer.
  RepeatedCalls(const Communicator& communicator, py::object order, py::object current_stream)
      : communicator_(communicator), order_(std::move(order)), current_stream_(std::move(current_stream)) {}

  // `counter` counts the calls of the region.
  void open(py::object region, py::object dispatches, py::object combines, uint32_t counter) {
    dispatches_ = dispatches.cast<BuffersInUse*>();
    combines_ = combines.cast<BuffersInUse*>();
    region_ = region.cast<LowLatencyRegion*>();
    kept_ = py::make_tuple(std::move(region), std::move(dispatches), std::move(combines));
    counter_ = counter;
  }
  void close() {
    region_ = nullptr;
    kept_ = py::none();
  }
  bool is_open() const { return region_ != nullptr; }

  // The current stream; nullopt: no call of this kind can be made there.
  std::optional<uintptr_t> stream_for(const LowLatencyPlan& plan, LowLatencyKind kind) const {
    if (!is_open() || buffers(kind).are_in_flight() || !region_->covers(plan)) return std::nullopt;
    const auto free_stream = order_.attr("free_stream").cast<std::optional<uintptr_t>>();
    const auto stream = current_stream_(communicator_.device()).cast<uintptr_t>();
    if (free_stream != stream || region_->is_capturing(stream_of(stream))) return std::nullopt;
    return stream;
  }

  BuffersInUse& buffers(LowLatencyKind kind) const {
    return kind == LowLatencyKind::kDispatch ? *dispatches_ : *combines_;
  }

  // Ends a call that was launched. Returns whether a kernel has reported a fault.
  bool end(LowLatencyKind kind, uintptr_t stream) const {
    buffers(kind).note_done();
    if (const auto event = order_.attr("free_event").cast<std::optional<uintptr_t>>()) {
      check_cuda(cudaEventRecord(reinterpret_cast<cudaEvent_t>(*event), stream_of(stream)), "cudaEventRecord");
    }
    return communicator_.has_fault();
  }

  LowLatencyRegion& region() const { return *region_; }
  uint32_t counter() const { return counter_; }
  int device() const { return communicator_.device(); }

 private:
  const Communicator& communicator_;
  py::object order_, current_stream_, kept_ = py::none();
  LowLatencyRegion* region_ = nullptr;
  BuffersInUse *dispatches_ = nullptr, *combines_ = nullptr;
  uint32_t counter_ = 0;
};

// Dispatches of one shape without a hook.
class RepeatedDispatch {
 public:
  // A dispatch fills `num_ints` beside its rows. `make_rows` and `make_scales` return new tensors; rows without scales
  // have None. `take` is RouteMemory.take.
  RepeatedDispatch(const RepeatedCalls& calls, const LowLatencyPlan& plan, int num_tokens, int64_t num_ints,
                   py::object make_rows, py::object make_scales, py::object take)
      : calls_(calls),
        plan_(plan),
        num_tokens_(num_tokens),
        results_bytes_((num_ints * static_cast<int64_t>(sizeof(int32_t)) + kResultsAlignBytes - 1) /
                       kResultsAlignBytes * kResultsAlignBytes),
        make_rows_(std::move(make_rows)),
        make_scales_(std::move(make_scales)),
        take_(std::move(take)) {}

  // Returns rows, scales, counts, the chunk and the address of the results, the stream, and whether a kernel has
  // reported a fault. None: the call has not been made.
  py::object call(Address rows, Address topk_idx, Address global_scale, Address wait_stats) {
    const std::optional<uintptr_t> stream = calls_.stream_for(plan_, LowLatencyKind::kDispatch);
    if (!stream || rows % kRowAlignBytes != 0) return py::none();
    if (num_left_ == 0 || *stream != stream_) take_results(*stream);
    const py::object received = make_rows_(), scales = make_scales_.is_none() ? py::object(py::none()) : make_scales_();
    calls_.region().dispatch_tokens(plan_, calls_.buffers(LowLatencyKind::kDispatch).next_idx(),
                                    tokens_out(rows, topk_idx, num_tokens_, global_scale, calls_.counter()),
                                    tokens_in(address_of(received), address_of(scales), wait_stats),
                                    pointer<int32_t>(results_), stream_of(*stream));
    const bool has_fault = calls_.end(LowLatencyKind::kDispatch, *stream);
    const uintptr_t results = std::exchange(results_, results_ + results_bytes_);
    --num_left_;
    return py::make_tuple(received, scales, make_counts(plan_, memory_, results, calls_.device()), chunk_, results,
                          *stream, has_fault);
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
  py::object make_rows_, make_scales_, take_;
  // What the next dispatches on `stream_` fill.
  py::object chunk_, memory_;
  uintptr_t results_ = 0, stream_ = 0;
  int num_left_ = 0;
};

// Makes a combine without a hook, if the current stream is `stream`. Returns whether a kernel has reported a fault;
// None: the call has not been made. `results` are those of the dispatch.
py::object combine(const RepeatedCalls& calls, const LowLatencyPlan& plan, Address rows, Address results,
                   Address topk_idx, Address topk_weights, Address out, int num_tokens, bool use_logfmt,
                   int min_tokens_to_sum, Address wait_stats, uintptr_t stream) {
  const bool is_aligned = (rows | topk_weights | out) % kRowAlignBytes == 0;
  if (!is_aligned || calls.stream_for(plan, LowLatencyKind::kCombine) != stream) return py::none();
  calls.region().combine_rows(plan, calls.buffers(LowLatencyKind::kCombine).next_idx(),
                              rows_home(rows, results, topk_weights, num_tokens, use_logfmt), min_tokens_to_sum,
                              rows_to_sum(results, topk_idx, topk_weights, out, num_tokens, use_logfmt),
                              pointer<int64_t>(wait_stats), stream_of(stream));
  return py::bool_(calls.end(LowLatencyKind::kCombine, stream));
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
           py::arg("topk_weights"), py::arg("out"), py::arg("num_tokens"), py::arg("use_logfmt"),
           py::arg("min_tokens_to_sum"), py::arg("wait_stats"), py::arg("stream"));
  py::class_<RepeatedDispatch>(module, "RepeatedLowLatencyDispatch")
      .def(py::init<const RepeatedCalls&, const LowLatencyPlan&, int, int64_t, py::object, py::object, py::object>(),
           py::arg("calls"), py::arg("plan"), py::arg("num_tokens"), py::arg("num_ints"), py::arg("make_rows"),
           py::arg("make_scales"), py::arg("take"), py::keep_alive<1, 2>())
      .def("__call__", &RepeatedDispatch::call, py::arg("rows"), py::arg("topk_idx"), py::arg("global_scale"),
           py::arg("wait_stats"));
}

}  // namespace hybrid_ep::bindings
