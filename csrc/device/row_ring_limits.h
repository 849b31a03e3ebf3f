// Sizes of a row ring, for the host that shapes a launch and the device that runs it.
#pragma once

namespace hybrid_ep {

constexpr int kMaxStages = 32;  // of a warp

// Rows whose stores may still read their stages; a ring needs more stages than that. A row of dispatch is stored
// several times, a row of combine once.
constexpr int kDispatchStoresInFlight = 3;
constexpr int kCombineStoresInFlight = 2;

}  // namespace hybrid_ep
