// Sizes of a row ring, for the host that shapes a launch and the device that runs it.
#pragma once

namespace hybrid_ep {

constexpr int kMaxStages = 32;      // of a warp
constexpr int kStoresInFlight = 3;  // rows; a ring needs more stages than that

}  // namespace hybrid_ep
