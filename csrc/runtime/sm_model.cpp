#include "runtime/sm_model.h"

#include <algorithm>

#include "device/row_ring_limits.h"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

constexpr int kDefaultSms = 16;
constexpr int kDispatchSendWarps = 2;
constexpr int kCombineSendWarps = 3;  // each stores to one destination at a time

LaunchShape shape(int row_bytes, int asked, int num_device_sms, int num_send_warps, int stores_in_flight) {
  LaunchShape result{};
  result.num_sms = std::min({asked > 0 ? asked : kDefaultSms, num_device_sms, kMaxCtas});
  // A ring needs a stage more than it has stores in flight, so long rows leave room for fewer sending warps.
  const int rows_that_fit = kDynamicSharedBytes / row_bytes;
  result.num_send_warps = std::clamp(rows_that_fit / (stores_in_flight + 1), 1, num_send_warps);
  result.num_stages = std::clamp(rows_that_fit / result.num_send_warps, stores_in_flight + 1, kMaxStages);
  result.ring_bytes = result.num_send_warps * result.num_stages * row_bytes;
  return result;
}

}  // namespace

LaunchShape dispatch_shape(int row_bytes, int asked, int num_device_sms) {
  return shape(row_bytes, asked, num_device_sms, kDispatchSendWarps, kDispatchStoresInFlight);
}

LaunchShape combine_shape(int row_bytes, int asked, int num_device_sms) {
  return shape(row_bytes, asked, num_device_sms, kCombineSendWarps, kCombineStoresInFlight);
}

}  // namespace hybrid_ep
