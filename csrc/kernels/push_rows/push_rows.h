// What the wire probe of `hybrid-ep bench` launches. Legend: T rows of this rank, C destinations of a row, R ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layout/limits.h"

namespace hybrid_ep {

// 0 between kernels.
struct PushProgress {
  uint32_t sent_rows, finished_ctas;
};

struct PushRowsParams {
  const uint8_t* rows;         // [T, row_bytes]
  const int64_t* dst_rows;     // [T, C] (rank << 32) | row in that rank's memory, or −1; C ≤ 32, a lane for each
  uint8_t* memory[kMaxRanks];  // of each rank, as this one sees it
  PushProgress* progress;
  int num_rows, num_dst_rows, row_bytes, num_stages;
};

// Launches on the stream and returns; the caller has set the device. Throws CudaError if the launch is refused.
void launch_push_rows(PushRowsParams params, int num_sms, cudaStream_t stream);

}  // namespace hybrid_ep
