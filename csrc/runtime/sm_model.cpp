#include "runtime/sm_model.h"

#include <algorithm>

#include "device/row_ring_limits.h"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

constexpr int kDefaultSms = 16;
constexpr int kDispatchSendWarps = 2;

int num_sms(int asked, int num_device_sms) {
  return std::min({asked > 0 ? asked : kDefaultSms, num_device_sms, kMaxCtas});
}

}  // namespace

LaunchShape dispatch_shape(int row_bytes, int asked, int num_device_sms) {
  LaunchShape result{};
  result.num_sms = num_sms(asked, num_device_sms);
  // A ring needs a stage more than it has stores in flight, so long rows leave room for fewer sending warps.
  const int rows_that_fit = kDynamicSharedBytes / row_bytes;
  result.num_send_warps = std::clamp(rows_that_fit / (kDispatchStoresInFlight + 1), 1, kDispatchSendWarps);
  result.num_stages = std::clamp(rows_that_fit / result.num_send_warps, kDispatchStoresInFlight + 1, kMaxStages);
  result.ring_bytes = result.num_send_warps * result.num_stages * row_bytes;
  return result;
}

int combine_sms(int asked, int num_device_sms) { return num_sms(asked, num_device_sms); }

}  // namespace hybrid_ep
