#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <deque>
#include <vector>

#include "common/cuda_check.h"
#include "transport/copy_queue.h"
#include "transport/cuda_driver.h"

namespace hybrid_ep {
namespace {

constexpr size_t kBatch = 64;         // copies that are submitted at once
constexpr size_t kNumStreams = 2;     // so that a batch is copied while the flags of the one before are written
constexpr size_t kMaxInFlight = 256;  // batches

using BatchMemOp = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

class CudaCopyQueue final : public CopyQueue {
 public:
  CudaCopyQueue() : batch_mem_op_(find_driver_function<BatchMemOp>("cuStreamBatchMemOp")) {
    for (cudaStream_t& stream : streams_) {
      check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }
  }
  ~CudaCopyQueue() override {
    for (cudaStream_t stream : streams_) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
    for (cudaEvent_t event : in_flight_) cudaEventDestroy(event);
    for (cudaEvent_t event : free_events_) cudaEventDestroy(event);
  }

  bool copy(uint8_t* to, const uint8_t* from, size_t num_bytes, uint64_t* word_at, uint64_t word) override {
    if (writes_.size() == kBatch) return false;
    if (num_bytes > 0) {
      to_.push_back(to);
      from_.push_back(from);
      sizes_.push_back(num_bytes);
    }
    CUstreamBatchMemOpParams write{};
    write.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    write.writeValue.address = reinterpret_cast<CUdeviceptr>(word_at);
    write.writeValue.value64 = word;
    write.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // after all that the stream has written, at system scope
    writes_.push_back(write);
    return true;
  }

  bool progress() override {
    bool has_worked = false;
    while (!in_flight_.empty()) {
      const cudaError_t status = cudaEventQuery(in_flight_.front());
      if (status == cudaErrorNotReady) break;
      check_cuda(status, "cudaEventQuery");
      free_events_.push_back(in_flight_.front());
      in_flight_.pop_front();
      has_worked = true;
    }
    if (writes_.empty() || in_flight_.size() == kMaxInFlight) return has_worked;
    submit();
    return true;
  }

  bool is_quiet() const override { return writes_.empty() && in_flight_.empty(); }
  std::string describe() const override { return "copy engines"; }

 private:
  void submit() {
    const cudaStream_t stream = streams_[turn_++ % kNumStreams];
#if CUDART_VERSION >= 13000
    if (!sizes_.empty()) {
      cudaMemcpyAttributes attributes{};
      attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      size_t first = 0;
      check_cuda(
          cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes, &first, 1, stream),
          "cudaMemcpyBatchAsync");
    }
#else
    for (size_t i = 0; i < sizes_.size(); ++i) {
      check_cuda(cudaMemcpyAsync(to_[i], from_[i], sizes_[i], cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    }
#endif
    const CUresult status = batch_mem_op_(stream, static_cast<unsigned>(writes_.size()), writes_.data(), 0);
    if (status != CUDA_SUCCESS) throw CudaError("cuStreamBatchMemOp: error " + std::to_string(status));
    to_.clear();
    from_.clear();
    sizes_.clear();
    writes_.clear();
    cudaEvent_t event = nullptr;
    if (free_events_.empty()) {
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    } else {
      event = free_events_.back();
      free_events_.pop_back();
    }
    in_flight_.push_back(event);
    check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
  }

  const BatchMemOp batch_mem_op_;
  std::array<cudaStream_t, kNumStreams> streams_{};
  size_t turn_ = 0;
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> sizes_;
  std::vector<CUstreamBatchMemOpParams> writes_;
  std::deque<cudaEvent_t> in_flight_;
  std::vector<cudaEvent_t> free_events_;
};

}  // namespace

std::unique_ptr<CopyQueue> make_copy_queue() { return std::make_unique<CudaCopyQueue>(); }

}  // namespace hybrid_ep
