// What the ranks of a call must agree on. hybrid_ep/engine/agreement.py has the fields' names and values, and the
// wording of errors. A field that a call does not have is kAbsent.
#pragma once

#include <cstdint>

namespace hybrid_ep {

constexpr int32_t kAbsent = -1;

// Kinds of calls, as agreement.py numbers them.
enum class CallKind : int32_t { kDispatch = 0, kCombine = 2, kCopyOfExperts = 9 };

// In the order in which they are compared: the first that differs is named.
enum class CallField : int32_t {
  // Of a dispatch.
  kNumExperts,
  kNumTopk,
  kHasTopk,
  kHasWeights,
  kNumSlots,        // spare slots of a rank, where rows are of experts
  kReplicaMapping,  // a checksum, where rows are of experts or experts are copied
  kHidden,
  kDtype,
  kScaleDtype,
  kNumScales,
  kMostTokens,  // of a rank, where the caller says it
  kNumWorstTokens,
  kIsBounded,
  kDropsRows,  // beyond the bound, and the caller looks at a flag
  kArena,      // number of the arena where rows land, which a CUDA graph keeps
  kCommonBound,
  kPadMultiple,
  kHandle,  // that it goes along; a number that the caller gives
  kNumOfDispatch,
  // Of a combine, beside kHidden and kHandle.
  kNumWeights = kNumOfDispatch,
  // Of a low-latency dispatch.
  kShape,        // both words of its LowLatencyCall; the host finds which field differs
  kGlobalScale,  // its upper half
  kLogFmt,       // of a low-latency combine
  kCall,         // CallKind, where kernels of different kinds meet
  // Of a copy of experts.
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
