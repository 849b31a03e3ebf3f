// Numbers of calls, for host and device: 1, 2, … 2³² − 1, 1, … No call has number 0, the first value of every flag.
// Numbers are compared by their distance modulo 2³².
#pragma once

#include <cstdint>

#include "layout/expert_map.h"

namespace hybrid_ep {

HYBRID_EP_HOST_DEVICE uint32_t next_epoch(uint32_t epoch) { return epoch == UINT32_MAX ? 1 : epoch + 1; }
HYBRID_EP_HOST_DEVICE uint32_t previous_epoch(uint32_t epoch) { return epoch == 1 ? UINT32_MAX : epoch - 1; }

// Whether a flag has been raised in the call of this number or a later one.
HYBRID_EP_HOST_DEVICE bool has_reached_epoch(uint32_t seen, uint32_t epoch) {
  return static_cast<int32_t>(seen - epoch) >= 0;
}

}  // namespace hybrid_ep
