// The lanes of a warp.
#pragma once

namespace hybrid_ep {

constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace hybrid_ep
