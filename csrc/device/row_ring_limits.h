// Sizes of a row ring, for the host that shapes a launch and the device that runs it.
#pragma once

namespace hybrid_ep {

constexpr int kMaxStages = 32;  // of a warp

// Rows of dispatch whose bulk stores are in flight. A ring needs more stages than that.
constexpr int kDispatchStoresInFlight = 3;

}  // namespace hybrid_ep
