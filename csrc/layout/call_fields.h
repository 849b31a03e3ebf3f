// What the ranks of a call must agree on. hybrid_ep/agree/fields.py has the fields' names and values, and the
// wording of errors. A field that a call does not have is kAbsent.
#pragma once

#include <cstdint>

namespace hybrid_ep {

constexpr int32_t kAbsent = -1;

// The number that identifies a dispatch: its buffer, and its number there. Each is modulo what its bits hold.
constexpr int kDispatchNumberBits = 24;
inline int32_t dispatch_number(int buffer, int64_t number) {
  return (buffer & 0x7f) << kDispatchNumberBits | static_cast<int32_t>(number & ((1 << kDispatchNumberBits) - 1));
}

// Kinds of calls, as agreement.py numbers them.
enum class CallKind : int32_t { kDispatch = 0, kCombine = 2, kCopyOfExperts = 9 };

// In the order in which they are compared: the first that differs is named.
enum class CallField : int32_t {
  // Fields of a dispatch.
  kNumExperts,
  kNumTopk,
  kHasTopk,
  kHasWeights,
  kNumSlots,        // spare slots of a rank, if the rows are weights or gradients of experts
  kReplicaMapping,  // a checksum, with such rows and of a copy of experts
  kHidden,
  kDtype,
  kScaleDtype,
  kNumScales,
  kMostTokens,  // most tokens of a rank, if the caller gives the number
  kNumWorstTokens,
  kIsBounded,
  kDropsRows,  // whether rows beyond the bound only set a flag of the handle
  kArena,      // number of the arena where rows land, which a CUDA graph keeps
  kCommonBound,
  kPadMultiple,
  kHandle,  // number of the handle's dispatch, which the caller gives
  kNumOfDispatch,
  // Fields of a combine, beside kHidden and kHandle.
  kNumWeights = kNumOfDispatch,
  // Fields of low-latency calls.
  kShape,        // both words of LowLatencyCall; the host finds which field differs
  kGlobalScale,  // the upper half of the global scale
  kLogFmt,       // of a combine
  kCall,         // CallKind, where kernels of different kinds meet
  // A field of a copy of experts, beside kReplicaMapping.
  kExpertSizes  // a checksum
};
constexpr int kNumDispatchFields = static_cast<int>(CallField::kNumOfDispatch);

inline const char* key_of(CallField field) {
  constexpr const char* kKeys[] = {"num_experts",     "num_topk",         "has_topk",   "has_weights", "num_slots",
                                   "replica_mapping", "hidden",           "dtype",      "scale_dtype", "num_scales",
                                   "most_tokens",     "num_worst_tokens", "is_bounded", "drops_rows",  "arena",
                                   "common_bound",    "pad_multiple",     "handle",     "num_weights", "shape",
                                   "global_scale",    "use_logfmt",       "call",       "expert_sizes"};
  return kKeys[static_cast<int>(field)];
}

}  // namespace hybrid_ep
