// Parameters and launches of the low-latency kernels. Legend: T tokens of this rank, M most tokens of a rank, K top-k,
// LE local experts, R ranks, H hidden, W 4-byte words of scales.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layout/low_latency_layout.h"

namespace hybrid_ep {

// Parameters of both kernels of a dispatch.
struct DispatchTokensParams {
  LowLatencyDomain domain;
  LowLatencyShape shape;
  LowLatencyMessage message;
  ScaleFormat format;
  LowLatencyCall call;
};

struct SendTokensParams : DispatchTokensParams {
  const uint8_t* rows;       // [T, H] bf16
  const int64_t* topk_idx;   // [T, K]
  int32_t* row_of;           // [R, M, K]; filled with −1 for the receive to write to
  int32_t* num_too_many;     // [1] cleared to 0 as well
  LowLatencyNumber* number;  // [1] of this dispatch
  uint32_t counter;          // LowLatencyNumber::counter
  int num_tokens;
  const float* global_scale;  // of NVFP4 rows, or nullptr
};

struct ReceiveTokensParams : DispatchTokensParams {
  uint8_t* rows;          // [LE, M×R, row_bytes]
  uint32_t* scales;       // [LE, W, M×R], of NVFP4 rows [LE, ceil(M×R / 128), W, 32, 4], or nullptr
  int32_t* count;         // [LE]
  int32_t* src_info;      // [LE, M×R] source token
  int64_t* layout_range;  // [LE, R] (begin << 32) | count
  int32_t* row_of;        // [R, M, K] the packed row of a source's token and column of top-k, or −1
  int32_t* num_received;  // [R] tokens of each source
  int32_t* num_too_many;  // [1] rows of an expert that has more than its capacity, if one has
  int64_t* wait_stats;    // [R] or nullptr
};

// Parameters of both kernels that send rows home.
struct SendHomeParams {
  LowLatencyDomain domain;
  LowLatencyShape shape;
  const uint8_t* rows;             // [LE, M×R, H] bf16; signalled ones are written while the kernel runs
  const int32_t* row_of;           // [R, M, K]
  const int32_t* num_too_many;     // [1]
  const LowLatencyNumber* number;  // [1] of the handle's dispatch
  const float* topk_weights;       // [T, K]
  int num_tokens;
  bool use_logfmt;  // rows cross as LogFMT-10
  LowLatencyWeights weights;
};

struct ReturnRowsParams : SendHomeParams {
  const int32_t* num_received;  // [R]
  int64_t* wait_stats;          // [R] or nullptr
  // A source with at least so many tokens gets the rows of one token as their sum; ≥ kMinTokensToSum.
  int min_tokens_to_sum;
};

struct ReturnSignalledRowsParams : SendHomeParams {
  const int32_t* count;         // [LE]
  const int32_t* src_info;      // [LE, M×R] source token
  const int64_t* layout_range;  // [LE, R] (begin << 32) | count
  ExpertSignals signals;
};

struct SumRowsParams {
  LowLatencyDomain domain;
  LowLatencyShape shape;
  const LowLatencyNumber* number;  // [1] of the handle's dispatch
  const int64_t* topk_idx;         // [T, K]
  const float* topk_weights;       // [T, K]
  uint8_t* out;                    // [T, H] bf16
  int64_t* wait_stats;             // [R] or nullptr
  int num_tokens;
  bool use_logfmt;  // rows cross as LogFMT-10
};

// Sets up the kernels on the current device; once for each device, before they are launched.
void prepare_low_latency_dispatch();
void prepare_low_latency_combine();

// Each launches on the stream and returns; throws CudaError if the launch is refused. The sum may start while the
// previous kernel of the stream still runs, but writes nothing before that kernel has ended. `is_early`: the receive
// may start early too. It writes at once, so no other running kernel may use the memory of the results.
void launch_send_tokens(const SendTokensParams& params, int num_device_sms, cudaStream_t stream);
void launch_receive_tokens(const ReceiveTokensParams& params, int num_device_sms, bool is_early, cudaStream_t stream);
// Sends and receives in one kernel.
void launch_dispatch_tokens(const SendTokensParams& send, const ReceiveTokensParams& receive, int num_device_sms,
                            cudaStream_t stream);
void launch_return_rows(const ReturnRowsParams& params, int num_device_sms, cudaStream_t stream);
void launch_return_signalled_rows(const ReturnSignalledRowsParams& params, int num_sms, cudaStream_t stream);
void launch_sum_rows(const SumRowsParams& params, cudaStream_t stream);
// return_rows and the sum in one kernel.
void launch_combine_rows(const ReturnRowsParams& send, const SumRowsParams& sum, int num_device_sms,
                         cudaStream_t stream);

}  // namespace hybrid_ep
