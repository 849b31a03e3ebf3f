// The symmetric memory of low-latency calls: one region at each rank, the same at all of them.
//
//     control │ routes of dispatch │ flags of its slots │ its slots │ combine, two buffers of each
//
// Each kind has two buffers, so that two micro-batches can be in flight. A buffer of dispatch has a route (the experts
// of the token) and a slot (its row and scales) for each source rank and token. A token's slot is its own index, so a
// sender needs no counts. A route has its epoch, and each slot a flag. So the memory of routes and of flags never holds
// anything else, whatever the sizes of a call. A slot's flag is stored relaxed behind a fence at system scope, and
// loaded with acquire. A buffer of combine has a row for each token and column of top-k, and the weights of every
// rank's tokens, for partial sums.
//
// Epochs number the calls that use a buffer. They live here, not in launch arguments, so that a CUDA graph can be
// replayed. A sender first waits until the buffer's owner has read the rows of the call before. The owner publishes
// that at the begin of its next send of either kind, when its earlier kernels have ended.
#pragma once

#include <cstdint>

#include "layout/expert_map.h"
#include "layout/fault.h"
#include "layout/limits.h"

namespace hybrid_ep {

constexpr int kLowLatencyBuffers = 2;  // of each kind
constexpr int kChannelsPerScale = 128;
constexpr int kChannelsPerBlock = 16;  // of NVFP4
constexpr int kScalesPerWord = 4;      // of those that are a byte
// The scales of NVFP4 rows are stored in tiles of 128 rows and a word: row r is word r % 32 × 4 + r / 32 of its tile.
constexpr int kRowsPerTile = 128;
constexpr int64_t kLowLatencyAlignBytes = 128;
constexpr int kMaxLowLatencyTokens = 0xffff;  // M: what a flag can hold
// The fewest tokens of a source whose rows may be summed before they cross: for fewer, its weights are not sent.
constexpr int kMinTokensToSum = 32;
constexpr int kNumShapeWords = 2;  // that hold all of a shape and a format
// LowLatencySent::value. Up to kNoSums: from how many tokens on rows are sums; kNoSums is more tokens
// than a rank has. With one or both of the two upper bits, the rows cannot be used, and the lower bits hold the reason.
constexpr uint32_t kLogFmtBit = 1u << 29;       // beside that number: rows are LogFMT-10
constexpr uint32_t kTooManyRowsBit = 1u << 30;  // an expert's rows, of which the handle's dispatch has lost some
constexpr uint32_t kNoSignalBit = 1u << 31;     // index of a signal of experts that did not come
constexpr uint32_t kRefusedBits = kNoSignalBit | kTooManyRowsBit;  // number of the refusal: the rank refuses the call
constexpr uint32_t kNoSums = kLogFmtBit - 1;
enum class LowLatencyKind : int32_t { kDispatch = 0, kCombine = 1 };
// kNone: rows are bf16. kNvfp4 and kNvfp4Ue8m0: rows are e2m1, and scales e4m3 or UE8M0. Otherwise rows are e4m3.
enum class ScaleFormat : int32_t { kNone = 0, kFloat = 1, kPowerOfTwo = 2, kUe8m0 = 3, kNvfp4 = 4, kNvfp4Ue8m0 = 5 };
constexpr bool is_nvfp4(ScaleFormat format) { return format >= ScaleFormat::kNvfp4; }

// Some columns of a token's route, stored and loaded as one: column k has bits 12 k to 12 k + 11.
// Relaxed, at system scope: the epoch comes with the columns.
struct alignas(16) RoutePart {
  static constexpr int kColumns = 8, kBits = 12;
  static constexpr int kNoExpert = (1 << kBits) - 1;
  uint32_t experts[3];
  uint32_t epoch;  // of the call
};
static_assert(sizeof(RoutePart) == 16 && kMaxExperts <= RoutePart::kNoExpert);

// What the kernels of one kind have done with one buffer.
struct LowLatencyProgress {
  uint32_t epoch;          // of the last call that has ended; stored plainly by the last CTA
  uint32_t finished_ctas;  // 0 between kernels; relaxed additions at GPU scope, between fences where rows are sent
};

// Where experts signal that their rows are written. A counter for each block of rows of an expert, or one for all.
struct ExpertSignals {
  const uint32_t* raised;  // [LE, B]; loaded with acquire at system scope
  uint32_t expected;       // of a counter: from this value on, its rows are written
  int num_per_expert;      // B
  int rows_per_signal;
};

// What a rank publishes when it begins to send, stored and loaded as one: relaxed, at system scope.
struct alignas(16) LowLatencyBegun {
  static constexpr int kTokensBits = 16;
  // Its number of tokens; and << kTokensBits the upper half of its global scale, of NVFP4 rows. Two scales with the
  // same upper half differ by less than 1 %.
  uint32_t tokens;
  uint32_t call[kNumShapeWords];
  uint32_t epoch;
};
static_assert(sizeof(LowLatencyBegun) == 16 && kMaxLowLatencyTokens < 1 << LowLatencyBegun::kTokensBits);

// The number of a dispatch: equal at all of its ranks, and unique. A rank that refuses a combine gives 0.
struct LowLatencyNumber {
  uint32_t call;  // the epoch and the buffer: from device memory, so that it is another one in each replay of a graph
  uint32_t counter;  // what has counted the epoch; the host gives it

  static HYBRID_EP_HOST_DEVICE LowLatencyNumber of(uint32_t epoch, int buffer_idx, uint32_t counter) {
    return {kLowLatencyBuffers * (epoch - 1) + static_cast<uint32_t>(buffer_idx) + 1, counter};
  }
};

// What a rank publishes when all its rows of a combine have arrived, stored and loaded as one: relaxed behind a fence
// of the last CTA, and with acquire, at system scope.
struct alignas(16) LowLatencySent {
  // How many tokens a source must have for the rank to sum each token's rows before it sends them; above kNoSums it is
  // the reason why not all were sent.
  uint32_t value;
  LowLatencyNumber dispatch;  // of the handle; equal at all ranks
  uint32_t epoch;
};
static_assert(sizeof(LowLatencySent) == 16);

// One buffer of one kind.
struct LowLatencyChannel {
  // Written by peers, at system scope.
  LowLatencyBegun begun[kMaxRanks];   // by i (dispatch)
  LowLatencySent sent[kMaxRanks];     // by i (combine)
  uint32_t weights_epoch[kMaxRanks];  // by i when its weights have arrived here (combine): release, acquire
  // Written by i: the last call of this buffer whose rows i has read. Stored relaxed, because the kernels that read
  // them have ended; loaded with acquire.
  uint32_t free_epoch[kMaxRanks];
  // Written by this rank.
  LowLatencyProgress send, receive;
  // kNoSignalBit and the index of a signal that did not come to a combine; 0 between kernels. Set by atomics, read by
  // the last CTA of finish_send.
  uint32_t no_signal;
  uint32_t waited_us[kMaxRanks];  // for i in this call, as far as known (dispatch with wait statistics); by atomics
  // Whether i takes part in a call that receives, << 32, and the epoch of that call: see decide(). Set by atomics.
  uint64_t decided[kMaxRanks];
};

struct LowLatencyControl {
  LowLatencyChannel channels[2][kLowLatencyBuffers];  // by LowLatencyKind
  // Written by the host, and by a kernel that gave a rank up. Stored plainly: a CTA that sees the mask late waits for
  // the rank once more.
  int32_t masked[kMaxRanks];
};

// Sizes of one call, equal at all ranks.
struct LowLatencyShape {
  int num_experts, num_topk, hidden, max_tokens;  // E, K, H, M
};

// A shape and a format as ranks publish them. A rank that refuses the call publishes the number of its refusal instead,
// and sends no tokens. That value differs from all shapes, so no rank uses the rows of the call.
struct LowLatencyCall {
  static constexpr int kTokensBits = 16, kExpertsBits = 12, kTopkBits = 8;
  static constexpr uint32_t kRefusedBit = 1u << 31;  // of words[1]; words[0] is the number
  uint32_t words[kNumShapeWords];

  static LowLatencyCall of(const LowLatencyShape& shape, ScaleFormat format) {
    return {{static_cast<uint32_t>(shape.hidden) << kTokensBits | static_cast<uint32_t>(shape.max_tokens),
             static_cast<uint32_t>(format) << (kExpertsBits + kTopkBits) |
                 static_cast<uint32_t>(shape.num_topk) << kExpertsBits | static_cast<uint32_t>(shape.num_experts)}};
  }
  static LowLatencyCall refused(uint32_t number) { return {{number, kRefusedBit}}; }

  // Number of the refusal; 0 of a call that is not refused.
  uint32_t refusal() const { return words[1] == kRefusedBit ? words[0] : 0; }
  uint32_t num_experts() const { return words[1] & ((1u << kExpertsBits) - 1); }
  uint32_t num_topk() const { return words[1] >> kExpertsBits & ((1u << kTopkBits) - 1); }
  uint32_t scale_format() const { return words[1] >> (kExpertsBits + kTopkBits); }
  uint32_t hidden() const { return words[0] >> kTokensBits; }
  uint32_t max_tokens() const { return words[0] & ((1u << kTokensBits) - 1); }
};
static_assert(kMaxLowLatencyTokens < 1 << LowLatencyCall::kTokensBits && kMaxRowBytes / 2 < 1 << 16 &&
              kMaxExperts < 1 << LowLatencyCall::kExpertsBits && kMaxTopk < 1 << LowLatencyCall::kTopkBits);

inline int64_t low_latency_align(int64_t num_bytes) {
  return (num_bytes + kLowLatencyAlignBytes - 1) / kLowLatencyAlignBytes * kLowLatencyAlignBytes;
}

// Each message of a dispatch. A buffer has R × M routes and as many slots.
struct LowLatencyMessage {
  int row_bytes, num_scale_words;
  int num_route_parts;  // of a route, for K columns
  int slot_bytes;       // a row and its scales

  static LowLatencyMessage of(const LowLatencyShape& shape, ScaleFormat format) {
    const int num_scales = shape.hidden / kChannelsPerScale;
    LowLatencyMessage message{};
    message.row_bytes = format == ScaleFormat::kNone ? 2 * shape.hidden
                        : is_nvfp4(format)           ? shape.hidden / 2
                                                     : shape.hidden;
    message.num_scale_words = format == ScaleFormat::kNone    ? 0
                              : is_nvfp4(format)              ? shape.hidden / kChannelsPerBlock / kScalesPerWord
                              : format == ScaleFormat::kUe8m0 ? (num_scales + kScalesPerWord - 1) / kScalesPerWord
                                                              : num_scales;
    message.num_route_parts = (shape.num_topk + RoutePart::kColumns - 1) / RoutePart::kColumns;
    message.slot_bytes = static_cast<int>(low_latency_align(message.row_bytes + 4 * message.num_scale_words));
    return message;
  }
};

// The weights of combine: for each rank [M, K] fp32, behind [M, K] rows.
struct LowLatencyWeights {
  int64_t begin, rank_bytes;

  static LowLatencyWeights of(const LowLatencyShape& shape) {
    const int64_t num_columns = static_cast<int64_t>(shape.max_tokens) * shape.num_topk;
    return {low_latency_align(2 * shape.hidden * num_columns), low_latency_align(4 * num_columns)};
  }
};

// Bytes of one buffer of each kind, whatever the format: scales never make a row larger than one of bf16.
struct LowLatencyCapacity {
  int64_t routes_bytes, flags_bytes, slots_bytes, combine_bytes;

  static LowLatencyCapacity of(const LowLatencyShape& shape, int num_ranks) {
    const LowLatencyMessage message = LowLatencyMessage::of(shape, ScaleFormat::kNone);
    const LowLatencyWeights weights = LowLatencyWeights::of(shape);
    const int64_t num_tokens = static_cast<int64_t>(num_ranks) * shape.max_tokens;
    const auto route_bytes = static_cast<int64_t>(message.num_route_parts * sizeof(RoutePart));
    return {low_latency_align(num_tokens * route_bytes), low_latency_align(num_tokens * sizeof(uint32_t)),
            num_tokens * message.slot_bytes, weights.begin + num_ranks * weights.rank_bytes};
  }
  bool covers(const LowLatencyCapacity& other) const {
    return routes_bytes >= other.routes_bytes && flags_bytes >= other.flags_bytes && slots_bytes >= other.slots_bytes &&
           combine_bytes >= other.combine_bytes;
  }
  int64_t routes_begin(int buffer_idx) const {
    return low_latency_align(sizeof(LowLatencyControl)) + buffer_idx * routes_bytes;
  }
  int64_t flags_begin(int buffer_idx) const { return routes_begin(kLowLatencyBuffers) + buffer_idx * flags_bytes; }
  // Bytes from the begin of the region to the end of the parts that hold epochs.
  int64_t epochs_bytes() const { return flags_begin(kLowLatencyBuffers); }
  // Where the slots of a dispatch begin, or the rows of a combine.
  int64_t buffer_begin(LowLatencyKind kind, int buffer_idx) const {
    return kind == LowLatencyKind::kDispatch
               ? epochs_bytes() + buffer_idx * slots_bytes
               : epochs_bytes() + kLowLatencyBuffers * slots_bytes + buffer_idx * combine_bytes;
  }
  int64_t region_bytes() const { return buffer_begin(LowLatencyKind::kCombine, kLowLatencyBuffers); }
};

// The ranks of a domain and one buffer of their regions.
struct LowLatencyDomain {
  int rank, num_ranks;
  uint64_t timeout_ns;
  FaultRecord* fault;
  LowLatencyKind kind;
  int buffer_idx;
  bool takes_masks;                                 // a call goes on without a rank that does not come
  int64_t routes_begin, flags_begin, buffer_begin;  // in each region, bytes
  uint8_t* region[kMaxRanks];
};

}  // namespace hybrid_ep
