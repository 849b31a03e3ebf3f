#include "runtime/sm_model.h"

#include <algorithm>

#include "device/row_ring_limits.h"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

constexpr int kDefaultSms = 16;
constexpr int kDefaultSmsFromExperts = 24;  // each SM also adds the rows that it sends
constexpr int kDispatchSendWarps = 2;
constexpr int kCombineSendWarps = 3;  // each stores to one destination at a time
constexpr int kSumShare = 6;          // one part in so many of the shared memory is for what arrives at a combine

int sms(int asked, int num_device_sms, int default_sms = kDefaultSms) {
  return std::min({asked > 0 ? asked : default_sms, num_device_sms, kMaxCtas});
}

// Shapes rings of rows that have so many bytes of shared memory.
void shape_rows(LaunchShape& shape, int row_bytes, int num_bytes, int num_send_warps, int stores_in_flight) {
  // A ring needs a stage more than it has stores in flight, so long rows leave room for fewer sending warps.
  const int rows_that_fit = num_bytes / row_bytes;
  shape.num_send_warps = std::clamp(rows_that_fit / (stores_in_flight + 1), 1, num_send_warps);
  shape.num_stages = std::clamp(rows_that_fit / shape.num_send_warps, stores_in_flight + 1, kMaxStages);
  shape.ring_bytes += shape.num_send_warps * shape.num_stages * row_bytes;
}

}  // namespace

LaunchShape dispatch_shape(int row_bytes, int asked, int num_device_sms) {
  LaunchShape shape{};
  shape.num_sms = sms(asked, num_device_sms);
  shape_rows(shape, row_bytes, kDynamicSharedBytes, kDispatchSendWarps, kDispatchStoresInFlight);
  return shape;
}

LaunchShape combine_shape(int row_bytes, bool from_experts, int asked, int num_device_sms) {
  const int part_bytes = std::min(row_bytes, kPartBytes), parts_that_fit = kDynamicSharedBytes / part_bytes;
  LaunchShape shape{};
  shape.num_sms = sms(asked, num_device_sms, from_experts ? kDefaultSmsFromExperts : kDefaultSms);
  shape.num_sum_stages = std::clamp(parts_that_fit / kSumShare, 2, kMaxStages);
  shape.ring_bytes = (shape.num_sum_stages + kOutStages) * part_bytes;
  if (from_experts) {
    const int parts_left = parts_that_fit - shape.num_sum_stages - kOutStages;
    shape.num_stages = std::clamp(parts_left - kOutStages, 2, kMaxStages);
    shape.ring_bytes += (shape.num_stages + kOutStages) * part_bytes;
  } else {
    shape_rows(shape, row_bytes, kDynamicSharedBytes - shape.ring_bytes, kCombineSendWarps, kCombineStoresInFlight);
  }
  return shape;
}

}  // namespace hybrid_ep
