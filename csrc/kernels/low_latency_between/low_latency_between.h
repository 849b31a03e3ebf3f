// Parameters and launches of the kernels that make low-latency calls between domains. Legend: T tokens of this rank, M
// most tokens of a rank, K top-k, E experts, LE local experts, R ranks, H hidden.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layout/low_latency_between_layout.h"
#include "transport/link_view.h"

namespace hybrid_ep {

// Parameters of all four kernels. A rank of another domain has this rank's own region as its address.
struct LowLatencyBetweenParams {
  LowLatencyDomain domain;  // all ranks
  LowLatencyPeers peers;
  LowLatencyShape shape;
  LinkView link;
};

struct ShipTokensParams : LowLatencyBetweenParams {
  LowLatencyMessage message;
  const int64_t* topk_idx;  // [T, K]
  int num_tokens;
};

struct ForwardTokensParams : LowLatencyBetweenParams {
  LowLatencyMessage message;
  LowLatencyCall call;
  int64_t* wait_stats;  // [R] or nullptr
};

struct ShipRowsParams : LowLatencyBetweenParams {
  const uint8_t* rows;             // [LE, M×R, H] bf16
  const int32_t* row_of;           // [R, M, K]
  const int32_t* src_info;         // [LE, M×R] source token
  const int64_t* layout_range;     // [LE, R] (begin << 32) | count
  const int32_t* num_received;     // [R]
  const int32_t* num_too_many;     // [1]
  const LowLatencyNumber* number;  // [1] of the handle's dispatch
  bool use_logfmt;
  // Copies of the tables without rows of other domains, for the kernel that sends inside the own one: written, or
  // nullptr.
  int32_t* own_row_of;        // [R, M, K], −1 for rows of other domains
  int32_t* own_num_received;  // [R], 0 for ranks of other domains
  bool ships;                 // false: only writes the copies
  bool follows_own;           // whether the kernel of the own domain has run; the chunk passes its flag on
};

struct ForwardRowsParams : LowLatencyBetweenParams {
  int64_t* wait_stats;  // [R] or nullptr
};

// Sets up the kernels of a dispatch on the current device, so that they run beside those of one domain; once for each
// device, before they are launched.
void prepare_low_latency_between_dispatch();

// Each launches on the stream and returns; throws CudaError if the launch is refused. Each waits for the kernels before
// it. A kernel behind one that forwards may start early.
void launch_ship_tokens(const ShipTokensParams& params, int num_device_sms, cudaStream_t stream);
void launch_forward_tokens(const ForwardTokensParams& params, int num_device_sms, cudaStream_t stream);
void launch_ship_rows(const ShipRowsParams& params, int num_device_sms, cudaStream_t stream);
void launch_forward_rows(const ForwardRowsParams& params, int num_device_sms, cudaStream_t stream);

}  // namespace hybrid_ep
