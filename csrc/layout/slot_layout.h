// Offsets in a slot of the arena: the parts of a dispatch's result, or of a combine's incoming partial rows.
//
// All parts hold the same number of rows. It follows from the slot's size and the bytes of a row. Both are equal at all
// ranks of a call, so a sender knows the receiver's offsets. With rows by expert and a bound, what stands beside the
// rows has a number of records of its own: the bound counts copies, and a record arrives for each received row, also
// for one whose copies all lie beyond the bound.
#pragma once

#include <cstdint>

#include "layout/expert_map.h"
#include "layout/offsets.h"

namespace hybrid_ep {

constexpr int64_t kPartAlignBytes = 128;
constexpr int64_t kNumParts = 4;

struct SlotLayout {
  int64_t rows, experts, weights, scales;  // byte offsets in the slot
  int32_t capacity;                        // rows; −1: the slot does not even hold the records
  int32_t num_records;                     // rows of the parts beside the rows
};

// Bytes per row of each part; a part that is not there has 0.
struct RowWidths {
  int64_t rows, experts, weights, scales;

  int64_t bytes_beside() const { return experts + weights + scales; }
  int64_t record_bytes() const { return rows + bytes_beside(); }
};

// `num_records`: 0 = as many as rows.
inline SlotLayout make_slot_layout(const RowWidths& widths, int64_t slot_bytes, int num_records = 0) {
  const int64_t space = slot_bytes - kNumParts * kPartAlignBytes - num_records * widths.bytes_beside();
  const int64_t capacity = space < 0 ? 0 : space / (num_records > 0 ? widths.rows : widths.record_bytes());
  SlotLayout layout{};
  layout.capacity = static_cast<int32_t>(capacity > INT32_MAX ? INT32_MAX : capacity);
  layout.num_records = num_records > 0 ? num_records : layout.capacity;
  Offsets offsets(kPartAlignBytes);
  layout.rows = offsets.append(layout.capacity * widths.rows);
  layout.experts = offsets.append(layout.num_records * widths.experts);
  layout.weights = offsets.append(layout.num_records * widths.weights);
  layout.scales = offsets.append(layout.num_records * widths.scales);
  if (num_records > 0 && space < 0) layout.capacity = -1;
  return layout;
}

// The slot size from which `num_rows` rows fit; `num_records` as above.
inline int64_t slot_bytes_for(const RowWidths& widths, int64_t num_rows, int num_records = 0) {
  const int64_t beside = (num_records > 0 ? num_records : num_rows) * widths.bytes_beside();
  return num_rows * widths.rows + beside + kNumParts * kPartAlignBytes;
}

}  // namespace hybrid_ep
