// Sizes of a row ring, for the host that shapes a launch and the device that runs it.
#pragma once

namespace hybrid_ep {

constexpr int kMaxStages = 32;  // of a warp

// Rows whose stores may still read their stages; a ring needs more stages than that. A row of dispatch is stored
// several times, a row of combine once.
constexpr int kDispatchStoresInFlight = 3;
constexpr int kCombineStoresInFlight = 2;

// Of a ring of sums (device/sum_ring.cuh): warps that add, bytes that they hold of a row, and stages of what leaves.
constexpr int kSumWarps = 7;
constexpr int kPartBytes = kSumWarps * 2048;
constexpr int kOutStages = 3;

}  // namespace hybrid_ep
