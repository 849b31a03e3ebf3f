// Plans: what follows from the sizes and dtypes of a call. A plan is arithmetic, made for each call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "layout/call_fields.h"
#include "layout/control_block.h"
#include "layout/fault.h"
#include "layout/route_layout.h"
#include "layout/slot_layout.h"

namespace hybrid_ep {

// The type of an element, as DLPack names it.
struct ElementType {
  uint8_t code, bits;
};
constexpr uint8_t kInt = 0, kBytes = 1, kFloat = 2, kBfloat = 4, kFloat8 = 10;  // codes; the last is e4m3fn

// Bytes of an element of this dtype, by number.
int64_t bytes_of(int dtype);

// The columns of a tensor with a row for each token, and their type. num = 0: there is no such tensor.
struct Columns {
  int num;
  ElementType type;

  int64_t bytes() const { return static_cast<int64_t>(num) * type.bits / 8; }
};

// A token's row and what travels with it.
struct RowFormat {
  Columns rows, experts, weights, scales;

  RowWidths widths() const { return {rows.bytes(), experts.bytes(), weights.bytes(), scales.bytes()}; }
};

// The experts that a rank reports.
struct ExpertRange {
  int first, end;
};

// The sizes of a dispatch, of which its plan is made. Dtypes are numbered as hybrid_ep/agree/fields.py does it.
// - expert_range: the experts that are reported, equal at all ranks or each rank's own; none: the dispatch reads a
// route
//   that another has made.
// - pad_multiple: 0: rows by source; otherwise by expert, blocks padded to a multiple.
// - bound: rows of the result, or that any slot must hold for a known route; none: the host waits for the counts.
// - common_bound: with a bound that differs between ranks, a bound of them all, equal at all ranks.
// - num_sms: none: the default.
// - max_tokens: the most tokens of a rank, equal at all ranks; none: what the kernels take.
// - num_mapped_ranks, num_slots: of the mapping, if the rows are weights or gradients of experts.
// - num_records: of received rows, which slots hold beside the rows of copies; 0: as many as rows.
// - drops_rows: rows beyond the bound only set the flag of the route.
// - refusal: number of the refusal of this rank, which then sends nothing; none: the call is not refused.
struct DispatchRequest {
  int num_tokens, hidden, dtype;
  int num_scales, scale_dtype;  // scale_dtype: kAbsent without scales
  int num_topk, num_experts;
  bool has_topk, has_weights;
  std::optional<ExpertRange> expert_range;
  int pad_multiple;
  std::optional<int> bound, common_bound, num_sms, max_tokens, num_slots, num_mapped_ranks;
  int num_records;
  bool drops_rows;
  std::optional<int> refusal;
};

// Ranks publish these fields of a dispatch, which hybrid_ep/agree/fields.py numbers.
struct DispatchCall {
  int dtype, scale_dtype;  // kAbsent without scales
  bool has_topk;           // whether the routing came as top-k indices
  int num_slots;           // spare slots of a rank, where rows are of experts; otherwise kAbsent
  int num_mapped_ranks;    // whose spare slots one mapping has; otherwise kAbsent
  int num_worst_tokens;    // that all ranks give alike, or kAbsent
  int common_bound;        // of a bound call: rows that each slot must hold; otherwise kAbsent
  bool drops_rows;         // beyond the bound, and only the route's flag says so
  FaultKind refusal;       // what is wrong with this rank's arguments, which only its host sees; then no rank sends
  int refused_value;       // the argument
  int allowed;             // its largest value
  int most_tokens;         // that a rank may have, as the caller says; otherwise kAbsent
  int max_tokens;          // that a rank may have: at most kMaxTokens
};

// The plan of a dispatch: what is sent and published, inside a domain and between domains.
struct DispatchShape {
  RowFormat format;  // as rows land
  bool makes_route;  // false: the dispatch goes along the route of an earlier one
  int num_tokens, num_topk, num_experts;
  int range_first, range_step, range_size;
  int pad_multiple;  // 0: rows by source rank and token; otherwise by expert, between domains after they have arrived
  int row_limit;     // rows of the result, where the host does not wait for counts
  int num_records;   // of received rows in a slot (SlotLayout); 0: as many as rows
  bool waits_for_counts;
  int num_sms;  // 0: the default
  DispatchCall call;

  static DispatchShape of(const DispatchRequest& request, int rank, int num_ranks);

  SlotLayout slot_layout(int64_t slot_bytes) const {
    return make_slot_layout(format.widths(), slot_bytes, num_records);
  }
  // The slot size from which `num_rows` rows fit.
  int64_t slot_bytes_for(int64_t num_rows) const {
    return hybrid_ep::slot_bytes_for(format.widths(), num_rows, num_records);
  }
};

// Writes the fields that ranks must agree on to kNumDispatchFields words. `handle`: number of the handle's dispatch;
// kAbsent where the call makes its route. `arena`: its number. `capacity`: rows that a slot holds.
void write_fields(int32_t* fields, const DispatchShape& plan, int arena, int capacity, int handle);

// A dispatch inside a domain.
struct DispatchPlan : DispatchShape {
  RouteLayout route;
  int num_ranks;

  static DispatchPlan of(const DispatchRequest& request, int rank, int num_ranks);
  // The most rows that a rank sends in a call whose counts the host does not know, equal at all ranks.
  int most_sent() const {
    return num_records > 0 ? num_records / num_ranks * std::min(num_topk, num_ranks) : call.common_bound;
  }
};

// The addresses of one dispatch; nullptr for what the call does not have.
struct DispatchTensors {
  const uint8_t* rows;
  const int64_t* topk_idx;
  const float* topk_weights;
  const uint32_t* scales;
  int32_t* route;
  const int64_t* mapping_checksum;  // where rows are of experts
};

// What a handle of an expert-major dispatch keeps of the rows that arrived, in this order.
struct KeptRows {
  int32_t* dst_row;     // [N, K]
  uint32_t* row_epoch;  // [N]
};

inline KeptRows kept_rows(int32_t* memory, int num_recv, int num_topk) {
  return {memory, reinterpret_cast<uint32_t*>(memory + static_cast<int64_t>(num_recv) * num_topk)};
}

// The addresses for the kernel that completes expert-major rows; nullptr for what the call does not have.
struct DuplicateTensors {
  const int32_t* route;
  int32_t* kept;  // what the handle keeps (KeptRows): written by a call that makes its route, otherwise read
  float* probs;
  uint32_t* scales;
};

// A combine, inside a domain or between domains.
struct CombinePlan {
  RowWidths widths;
  int num_tokens;              // of the result
  int num_topk, num_experts;   // of the route
  int num_weights;             // of a row; 0: none
  int num_sms;                 // 0: the default
  int num_expert_sms;          // that sum rows of experts, where the sums are sent; 0: the default
  std::optional<int> refusal;  // number of the refusal of this rank; then no rank sends
};

// Writes the words that ranks must agree on. `arena`: its number. `handle`: that of the handle's dispatch.
void write_call(uint32_t (&call)[kNumReadyWords], const CombinePlan& plan, int arena, int handle);

// The addresses of one combine; nullptr for what the call does not have.
struct CombineTensors {
  uint8_t* rows;  // from experts: written, as are the weights
  int num_rows;
  float* weights;
  const uint8_t* bias[2];
  uint8_t* out;
  float* out_weights;
  const int32_t* route;
};

// Further addresses of a combine from experts.
struct ExpertTensors {
  const uint8_t* rows;
  std::optional<int> num_rows;  // none: the combine is not from experts
  const float* probs;
  int32_t* kept;  // KeptRows
};

}  // namespace hybrid_ep
