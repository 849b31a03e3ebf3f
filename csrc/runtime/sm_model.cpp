#include "runtime/sm_model.h"

#include <algorithm>

#include "device/row_ring_limits.h"
#include "kernels/launch.h"

namespace hybrid_ep {
namespace {

constexpr int kDefaultSms = 16;

LaunchShape shape(int row_bytes, int asked, int num_device_sms, int num_send_warps) {
  LaunchShape result{};
  result.num_sms = std::min({asked > 0 ? asked : kDefaultSms, num_device_sms, kMaxCtas});
  // A ring needs a stage more than it has stores in flight, so long rows leave room for fewer sending warps.
  const int rows_that_fit = kDynamicSharedBytes / row_bytes;
  result.num_send_warps = std::clamp(rows_that_fit / (kStoresInFlight + 1), 1, num_send_warps);
  result.num_stages = std::clamp(rows_that_fit / result.num_send_warps, kStoresInFlight + 1, kMaxStages);
  result.ring_bytes = result.num_send_warps * result.num_stages * row_bytes;
  return result;
}

}  // namespace

LaunchShape dispatch_shape(int row_bytes, int asked, int num_device_sms) {
  return shape(row_bytes, asked, num_device_sms, 2);
}

LaunchShape combine_shape(int row_bytes, int asked, int num_device_sms) {
  return shape(row_bytes, asked, num_device_sms, 2);
}

}  // namespace hybrid_ep
