#include "runtime/sm_model.h"

#include <algorithm>
#include <cmath>

#include "device/row_ring_limits.h"
#include "kernels/launch.h"
#include "layout/limits.h"

namespace hybrid_ep {
namespace {

constexpr int kDefaultSms = 16;
constexpr int kFewSms = 8;
constexpr int kCombineSmsOfTwo = 20;  // ranks: half of the rows that are summed do not cross, and sums are the limit
// GB/s on Hopper: what one SM stores (rows for its own GPU count too), and what leaves a GPU over NVLink.
constexpr double kSmRate = 50, kWireRate = 340;
constexpr int kWindowBytes = 896 * 1024;  // of stores on the wire, likewise
constexpr int kDispatchSendWarps = 2;
// What a sending warp loads ahead: enough to cover the latency of a load under full load. More would unbalance the SMs:
// a slow one would still have its rows to send when the others have ended.
constexpr int kBytesAhead = 48 * 1024, kMinRowsAhead = 2;
constexpr double kExpertSmsPerCopy = 0.75;  // SMs that sum experts' rows, for each SM that sends the sums

int num_sms(int asked, int its_default, int num_device_sms) {
  return std::min({asked > 0 ? asked : its_default, num_device_sms, kMaxCtas});
}

// With fewer ranks, more rows stay on their own GPU, and more SMs are needed to fill the wire with the others. SMs
// beyond that slow the call down.
int default_dispatch_sms(int num_ranks, bool is_hopper) {
  const double rate_that_fills_wire = kWireRate * num_ranks / (num_ranks - 1.0);
  return is_hopper && kFewSms * kSmRate >= rate_that_fills_wire ? kFewSms : kDefaultSms;
}

}  // namespace

LaunchShape dispatch_shape(int row_bytes, int counter_bytes, int asked, int num_ranks, bool is_hopper,
                           int num_device_sms) {
  LaunchShape result{};
  result.num_sms = dispatch_sms(asked, num_ranks, is_hopper, num_device_sms);
  // A ring needs a stage more than it has stores in flight, so long rows leave memory for fewer sending warps. The
  // rings lie behind the counters, where rows can be loaded while these are in use, unless that costs a warp or they do
  // not fit.
  constexpr int kMinStages = kDispatchStoresInFlight + 1;
  const int counters_end = (counter_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  const int rows_behind = (kDynamicSharedBytes - counters_end) / row_bytes;
  int rows_that_fit = kDynamicSharedBytes / row_bytes;
  result.num_send_warps = std::clamp(rows_that_fit / kMinStages, 1, kDispatchSendWarps);
  result.rings_overlap = rows_behind < result.num_send_warps * kMinStages;
  if (!result.rings_overlap) {
    rows_that_fit = rows_behind;
    result.rings_begin = counters_end;
  }
  const int num_ahead = std::clamp(kBytesAhead / row_bytes, kMinRowsAhead, kMaxStages - kDispatchStoresInFlight);
  result.num_stages =
      std::clamp(rows_that_fit / result.num_send_warps, kMinStages, kDispatchStoresInFlight + num_ahead);
  const int ring_bytes = result.num_send_warps * result.num_stages * row_bytes;
  result.shared_bytes = std::max(counter_bytes, result.rings_begin + ring_bytes);
  return result;
}

int dispatch_sms(int asked, int num_ranks, bool is_hopper, int num_device_sms) {
  return num_sms(asked, default_dispatch_sms(num_ranks, is_hopper), num_device_sms);
}

int combine_sms(int asked, int num_ranks, int num_device_sms) {
  return num_sms(asked, num_ranks == 2 ? kCombineSmsOfTwo : kDefaultSms, num_device_sms);
}

int copy_sms(int asked, int num_device_sms) { return num_sms(asked, kDefaultSms, num_device_sms); }

int between_sms(int asked, int num_device_sms) { return num_sms(asked, kDefaultSms, num_device_sms); }

int window_bytes(bool is_hopper) { return is_hopper ? kWindowBytes : 0; }

int expert_sms(int asked, int num_combine_sms, int num_topk, int num_ranks, int num_device_sms) {
  // As fast as the rows leave: faster sums take bandwidth of local memory from the combine while it runs.
  const double is_elsewhere = 1 - 1.0 / num_ranks;
  const double copies_per_row = num_topk / (num_ranks * (1 - std::pow(is_elsewhere, num_topk)));
  const int wanted = static_cast<int>(std::ceil(num_combine_sms * copies_per_row * kExpertSmsPerCopy));
  // A combine that was given all SMs shares them.
  return std::clamp(asked > 0 ? asked : wanted, 1, std::max(num_device_sms - num_combine_sms, num_device_sms / 2));
}

}  // namespace hybrid_ep
