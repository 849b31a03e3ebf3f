// What went wrong inside a kernel, as the host reads it: one record in pinned memory, written once.
#pragma once

#include <cstdint>

#include "layout/limits.h"

namespace hybrid_ep {

enum class FaultKind : int32_t {
  kNone = 0,
  kTimeout = 1,
  kBadExpert = 2,
  kOverflow = 3,
  kOtherCall = 4,
  kBadBound = 5,  // a rank gives a bound beyond the capacity that all have agreed on
  kTooManyTokens = 6,
  kTransport = 7,
  kNoSignal = 8,  // experts of a rank have not signalled in time that their rows are written
  kRefused = 9    // a rank has refused its call; the number of the refusal is seen
};
enum class KernelName : int32_t {
  kDispatch = 0,
  kCombine = 1,
  kLowLatencyDispatch = 2,
  kLowLatencyCombine = 3,
  kDispatchBetween = 4,
  kCombineBetween = 5,
  kStreamChunks = 6,
  kCopyExperts = 7
};

// What a wait waits for. The names that people read are in runtime/communicator.cpp.
enum class WaitTag : int32_t {
  kGrid = 0,
  kCounts = 1,
  kRows = 2,
  kReady = 3,
  kPartialRows = 4,
  kFreeSlots = 5,
  kWeights = 6,
  kRoutes = 7,
  kRecords = 8,
  kCredits = 9,
  kCommands = 10,
  kHeld = 11,
  kSignals = 12,
  kExperts = 13
};

// What low-latency kernels that send wait for. They wait for a part of the timeout only: device/low_latency.cuh.
constexpr bool is_of_send(WaitTag tag) {
  return tag == WaitTag::kFreeSlots || tag == WaitTag::kWeights || tag == WaitTag::kSignals;
}
constexpr int kSendTimeoutDivisor = 2;

// A bit for each rank that a fault can name: the ranks of this domain, then all ranks of all domains. Each rank has at
// least one expert, so there are no more ranks than kMaxExperts.
constexpr int kMissedWords = (kMaxRanks + kMaxExperts + 31) / 32;

struct FaultRecord {
  uint32_t claimed;  // by an atomic at system scope: the first fault takes the record, later ones are dropped
  uint32_t written;  // 1 once the fields below can be read: stored with release at system scope
  FaultKind kind;
  KernelName kernel;
  WaitTag tag;  // of kOtherCall, the CallField in which the peer's call differs
  int32_t rank;
  int32_t peer;      // the rank whose argument is wrong, or that did not come; −1 if no single rank is the cause
  int32_t witness;   // the rank that this one waited for, if that rank itself waited for the peer; otherwise −1. Of
                     // kOtherCall, the rank that has the expected value; −1 if that is this rank
  int64_t expected;  // epoch waited for, or what is allowed; of kOtherCall, what the peer's value must equal
  int64_t seen;      // epoch seen, or the value found; the peer's
  // Bit r: a wait of a normal call for rank r was given up before the fault was written. Set by relaxed atomics at
  // system scope.
  uint32_t missed[kMissedWords];
};

}  // namespace hybrid_ep
