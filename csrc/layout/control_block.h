// The small symmetric memory of a rank: counts and flags that its peers write, and counters of its own kernels.
//
// Epochs number the calls of a kind and live here, not in launch arguments, so that a CUDA graph can be replayed. Flags
// hold the epoch they were raised in and are never reset. One copy of each is enough. A rank writes those of dispatch
// n + 1 only after every peer has ended dispatch n, and those of combine n + 1 only after the peer has published that
// it is ready for it. What a combine publishes before that has two copies: a rank that waits for nobody's rows may
// begin call n + 1 before a peer has read its words of call n, but never call n + 2.
#pragma once

#include <cstdint>

#include "layout/call_fields.h"
#include "layout/limits.h"

namespace hybrid_ep {

// What rank i publishes to every rank at the start of a dispatch. Each word is value << 32 | epoch, so no flag and no
// fence is needed: words are stored and loaded relaxed, at system scope, and readers poll the word itself.
struct CountRow {
  enum Column {
    kSlotIdx,       // where in i's arena this call's rows land
    kRowLimit,      // rows that fit there
    kRefusal,       // FaultKind: what i has found wrong with its own arguments; then no rank sends
    kRefusedValue,  // the argument
    kSlotsWanted,   // slots that i's pool would need to copy no result; 0: it has enough
    kFirstField,    // CallField: equal at all ranks, otherwise no rank sends
    kNumCallColumns = kFirstField + kNumDispatchFields,
    kTokensPerRank = kNumCallColumns,              // tokens that i sends to each rank
    kTokensPerExpert = kTokensPerRank + kMaxRanks  // copies that i sends to each expert
  };
  uint64_t words[kTokensPerExpert + kMaxExperts];
};

// Chunks that a warp has sent, on their way to the warp of its CTA that reports them. Both counters are
// stored with release and loaded with acquire, at CTA scope.
struct alignas(32) ReportQueue {
  static constexpr uint32_t kCapacity = 4;
  uint32_t num_pushed, num_taken;  // wrap; equal between kernels
  int32_t reports[kCapacity];
};

// What a combine publishes before any rank sends, each value << 32 | epoch: arena_bits() | hidden << 8 | weights of a
// row; the number of the handle's dispatch. A copy of experts, which counts as a combine, publishes arena_bits() | a
// checksum of the experts' sizes; a checksum of the mapping; each with kCopiesExperts. Equal at all ranks, otherwise no
// rank sends. Earlier kernels have ended, so the words are stored relaxed, at system scope, and loaded with acquire.
constexpr int kNumReadyWords = 2, kNumWeightsBits = 8, kArenaShift = 24;
constexpr uint32_t kCopiesExperts = 1u << 31, kArenaBits = kCopiesExperts - (1u << kArenaShift);
// The first word of a rank that refuses its call; the second one is the number of the refusal. No call has a hidden of
// 0.
constexpr uint32_t kRefusesCall = 1;

// The number of the arena in the first of these words, modulo what fits there.
inline uint32_t arena_bits(int arena) { return static_cast<uint32_t>(arena) << kArenaShift & kArenaBits; }

struct ControlBlock {
  // Written by peers with release and loaded with acquire, at system scope; only counts are relaxed.
  CountRow counts[kMaxRanks];
  uint32_t rows_epoch[kMaxRanks];  // raised by i when all its rows of a dispatch have arrived in this rank's arena
  // Written by i when this rank's combine may write i's arena; [0] in even epochs and [1] in odd ones.
  uint64_t ready[2][kMaxRanks][kNumReadyWords];
  // Raised by i per chunk of partial rows, or of experts. A combine between domains counts all flags in a row.
  uint32_t chunk_epoch[kMaxRanks][kMaxChunksOfSource];
  // Written by i: 1 + the rank that i waits for in vain, or has lost. 0 while there is no such rank, and again once a
  // call of i has succeeded.
  uint32_t missed[kMaxRanks];

  // Written by this rank. The epochs are stored plainly by the last CTA of a kernel: the next kernel sees them. CTAs
  // count with acq_rel additions at GPU scope, and wait with acquire.
  uint32_t dispatch_epoch;
  uint32_t combine_epoch;
  uint32_t arrived_ctas;       // at the grid barrier; 0 between kernels
  uint32_t routed_ctas;        // of a dispatch, whose tokens have their final indices; 0 between kernels
  uint32_t started_ctas;       // of a combine from experts, relaxed: only the number counts; 0 between kernels
  uint32_t finished_ctas;      // 0 between kernels
  uint32_t failed;             // 1: a wait of this kernel was given up, and is reported; 0 between kernels
  unsigned long long refused;  // of a dispatch: FaultKind << 32 | argument, the first that is wrong; 0 between kernels
  uint32_t copy_refused;  // 1: in the last copy of experts ranks disagreed, so that its further launches do nothing
  // Counters of work indices, relaxed, at GPU scope; 0 between kernels. Each is in a cache line that nobody polls.
  alignas(kLineBytes) uint32_t sent_items;     // of sending warps: tokens of a dispatch, else chunks
  alignas(kLineBytes) uint32_t summed_tokens;  // of a combine's summing warps; chunks that are copied out of staging
  alignas(kLineBytes) ReportQueue report_queues[kMaxCtas][kMaxReportQueues];
  int32_t cta_counts[kMaxCtas][kMaxRanks + kMaxExperts];
};

}  // namespace hybrid_ep
