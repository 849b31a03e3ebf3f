// What went wrong inside a kernel, as the host reads it: one record in pinned memory, written once.
#pragma once

#include <cstdint>

namespace hybrid_ep {

enum class FaultKind : int32_t { kNone = 0, kTimeout = 1, kBadExpert = 2, kOverflow = 3, kOtherCall = 4 };
enum class KernelName : int32_t { kDispatch = 0, kCombine = 1, kLowLatencyDispatch = 2, kLowLatencyCombine = 3 };

// What a wait waits for; of kOtherCall, in what the peer's call differs. The names that people read are in
// runtime/communicator.cpp.
enum class WaitTag : int32_t {
  kGrid = 0,
  kCounts = 1,
  kRows = 2,
  kReady = 3,
  kPartialRows = 4,
  kRoom = 5,
  kWeights = 6,
  kNumExperts = 7,
  kRecordBytes = 8,
  kPadMultiple = 9,
  kShape = 10,
  kBound = 11,
  kRoutes = 12
};

// What low-latency kernels that send wait for. They wait for a part of the timeout only: device/low_latency.cuh.
constexpr bool is_of_send(WaitTag tag) { return tag == WaitTag::kRoom || tag == WaitTag::kWeights; }
constexpr int kSendTimeoutDivisor = 2;

struct FaultRecord {
  uint32_t claimed;  // the first fault takes the record; later ones are dropped
  uint32_t written;  // 1 once the fields below can be read
  FaultKind kind;
  KernelName kernel;
  WaitTag tag;
  int32_t rank;
  int32_t peer;      // −1 where no single rank is to blame
  int32_t witness;   // the rank that was waited for and has itself waited for the peer; −1 where it was the peer
  int64_t expected;  // epoch waited for, or what is allowed; of kOtherCall, this rank's value
  int64_t seen;      // epoch seen, or the value found; the peer's
};

}  // namespace hybrid_ep
