// Offsets in a slot of the arena: the parts of a dispatch's result, or of a combine's incoming partial rows.
//
// All parts hold the same number of rows. It follows from the slot's size and the bytes of a row. Both are equal at all
// ranks of a call, so a sender knows the receiver's offsets.
#pragma once

#include <cstdint>

#include "layout/expert_map.h"
#include "layout/offsets.h"

namespace hybrid_ep {

constexpr int64_t kPartAlignBytes = 128;
constexpr int64_t kNumParts = 4;

struct SlotLayout {
  int64_t rows, experts, weights, scales;  // byte offsets in the slot
  int32_t capacity;                        // rows
};

// Bytes per row of each part; a part that is not there has 0.
struct RowWidths {
  int64_t rows, experts, weights, scales;

  int64_t record_bytes() const { return rows + experts + weights + scales; }
};

inline SlotLayout make_slot_layout(const RowWidths& widths, int64_t slot_bytes) {
  const int64_t capacity = (slot_bytes - kNumParts * kPartAlignBytes) / widths.record_bytes();
  SlotLayout layout{};
  layout.capacity = static_cast<int32_t>(capacity < 0 ? 0 : capacity > INT32_MAX ? INT32_MAX : capacity);
  Offsets offsets(kPartAlignBytes);
  layout.rows = offsets.append(layout.capacity * widths.rows);
  layout.experts = offsets.append(layout.capacity * widths.experts);
  layout.weights = offsets.append(layout.capacity * widths.weights);
  layout.scales = offsets.append(layout.capacity * widths.scales);
  return layout;
}

// The slot size from which `num_rows` rows fit.
inline int64_t slot_bytes_for(const RowWidths& widths, int64_t num_rows) {
  return num_rows * widths.record_bytes() + kNumParts * kPartAlignBytes;
}

}  // namespace hybrid_ep
