// The only way to wait for another rank or CTA: poll, check the clock, and give up with a record of who is missing.
//
// The deadline belongs to the kernel, not to the wait. Once it has passed, every later wait polls once and gives up. So
// a kernel ends in time however many waits it has. After a failed wait it goes on to its end in order, and leaves
// barriers and epochs as a successful kernel does.
//
// A rank that dies inside a call has sent to some ranks and not to others. Ranks left short stall, and become the next
// ones waited for. So a rank that waits in vain publishes to all others which rank it waits for. It listens for
// kListenNs before it reports, and names the rank at the end of the chain, which has published nothing.
#pragma once

#include "device/ptx/memory.cuh"
#include "layout/control_block.h"
#include "layout/epoch.h"
#include "layout/fault.h"

namespace hybrid_ep {

constexpr uint64_t kListenNs = 1'000'000'000;  // how long a rank that gives up reads the reports of others

// Writes the fault record, unless it already holds a fault. Any thread.
__device__ inline void report_fault(FaultRecord* record, FaultKind kind, KernelName kernel, WaitTag tag, int rank,
                                    int peer, int64_t expected, int64_t seen, int witness = -1) {
  if (atomicCAS_system(&record->claimed, 0u, 1u) != 0u) return;
  record->kind = kind;
  record->kernel = kernel;
  record->tag = tag;
  record->rank = rank;
  record->peer = peer;
  record->witness = witness;
  record->expected = expected;
  record->seen = seen;
  ptx::store_release_system(&record->written, 1u);
}

// Two words as a fault record holds them.
__device__ inline int64_t as_one(uint32_t first, uint32_t second) { return static_cast<int64_t>(second) << 32 | first; }

// Reports that a field of the peer's call differs from this rank's, or from that of rank `witness`.
__device__ inline void report_other_call(FaultRecord* record, KernelName kernel, CallField field, int rank, int peer,
                                         int64_t mine, int64_t theirs, int witness = -1) {
  report_fault(record, FaultKind::kOtherCall, kernel, static_cast<WaitTag>(field), rank, peer, mine, theirs, witness);
}

// Reports how the peer's words of ControlBlock::ready differ from this rank's: the first field that differs, or that
// the peer refuses the call. A rank that refuses the call itself reports nothing, because its host raises.
__device__ inline void report_other_ready(FaultRecord* record, KernelName kernel, int rank, int peer,
                                          const uint32_t (&my_call)[kNumReadyWords],
                                          const uint32_t (&their_call)[kNumReadyWords]) {
  if (my_call[0] == kRefusesCall) return;
  if (their_call[0] == kRefusesCall) {
    report_fault(record, FaultKind::kRefused, kernel, WaitTag::kReady, rank, peer, 0, their_call[1]);
    return;
  }
  // NOTE: `word` indexes no array: the compiler would keep the array in local memory.
  const int word = my_call[0] == their_call[0] ? 1 : 0;
  uint32_t mine = word == 0 ? my_call[0] : my_call[1], theirs = word == 0 ? their_call[0] : their_call[1];
  CallField field = CallField::kHandle;
  const auto kind_of = [](uint32_t value) {
    return static_cast<uint32_t>((value & kCopiesExperts) != 0 ? CallKind::kCopyOfExperts : CallKind::kCombine);
  };
  if (((mine ^ theirs) & kCopiesExperts) != 0) {
    field = CallField::kCall;
    mine = kind_of(mine);
    theirs = kind_of(theirs);
  } else if (word == 0 && ((mine ^ theirs) & kArenaBits) != 0) {
    field = CallField::kArena;
    mine = (mine & kArenaBits) >> kArenaShift;
    theirs = (theirs & kArenaBits) >> kArenaShift;
  } else if ((mine & kCopiesExperts) != 0) {
    field = word == 0 ? CallField::kExpertSizes : CallField::kReplicaMapping;
    mine &= word == 0 ? ~(kCopiesExperts | kArenaBits) : ~kCopiesExperts;
    theirs &= word == 0 ? ~(kCopiesExperts | kArenaBits) : ~kCopiesExperts;
  } else if (word == 0 && mine >> kNumWeightsBits != theirs >> kNumWeightsBits) {
    field = CallField::kHidden;
    mine = (mine & ~kArenaBits) >> kNumWeightsBits;
    theirs = (theirs & ~kArenaBits) >> kNumWeightsBits;
  } else if (word == 0) {
    field = CallField::kNumWeights;
    mine &= (1u << kNumWeightsBits) - 1;
    theirs &= (1u << kNumWeightsBits) - 1;
  }
  report_other_call(record, kernel, field, rank, peer, mine, theirs);
}

class Waiter {
 public:
  // `control`: the control blocks of all ranks, in which a rank publishes the rank that it waits for in vain. nullptr:
  // nothing is published.
  __device__ Waiter(FaultRecord* record, KernelName kernel, int rank, uint64_t timeout_ns,
                    ControlBlock* const* control = nullptr, int num_ranks = 0)
      : record_(record),
        kernel_(kernel),
        rank_(rank),
        deadline_(ptx::clock_ns() + timeout_ns),
        control_(control),
        num_ranks_(num_ranks) {}

  // Waits until *flag, written by another GPU, has reached `epoch` (epochs wrap). Acquires at system scope.
  __device__ bool until_epoch(const uint32_t* flag, uint32_t epoch, int peer, WaitTag tag) const {
    const auto has_come = [&](uint32_t seen) { return has_reached_epoch(seen, epoch); };
    return poll([&] { return ptx::load_acquire_system(flag); }, has_come, epoch, peer, tag);
  }

  // Waits until the lower half of *flag has reached `epoch`. Writes the upper half to *value, unless a later epoch has
  // been raised already. Acquires at system scope.
  __device__ bool until_epoch(const uint64_t* flag, uint32_t epoch, int peer, WaitTag tag, uint32_t* value) const {
    const auto load = [&] {
      const uint64_t word = ptx::load_acquire_system(flag);
      const auto seen = static_cast<uint32_t>(word);
      if (seen == epoch) *value = static_cast<uint32_t>(word >> 32);
      return seen;
    };
    return poll(load, [&](uint32_t seen) { return has_reached_epoch(seen, epoch); }, epoch, peer, tag);
  }

  // Waits until 16 bytes, which are stored as one and end with their epoch, have reached `epoch`. Writes them to
  // *value, unless they hold a later epoch. Acquires at system scope.
  __device__ bool until_epoch(const uint4* words, uint32_t epoch, int peer, WaitTag tag, uint4* value) const {
    return until_come([&] { return ptx::load_acquire_system(words); }, epoch, peer, tag, value);
  }

  // until_epoch() for 16 bytes that are the whole message: orders no other memory.
  __device__ bool until_epoch_relaxed(const uint4* words, uint32_t epoch, int peer, WaitTag tag, uint4* value) const {
    return until_come([&] { return ptx::load_relaxed_system(words); }, epoch, peer, tag, value);
  }

  // Waits until *flag is exactly `epoch`: for a flag that not every call raises.
  __device__ bool until_equal(const uint32_t* flag, uint32_t epoch, int peer, WaitTag tag) const {
    const auto is_equal = [&](uint32_t seen) { return seen == epoch; };
    return poll([&] { return ptx::load_acquire_system(flag); }, is_equal, epoch, peer, tag);
  }

  // Waits until the lower half of *word is exactly `epoch`. The word is the whole message: orders no other memory.
  __device__ bool until_equal(const uint64_t* word, uint32_t epoch, int peer, WaitTag tag, uint64_t* value) const {
    const auto load = [&] { return static_cast<uint32_t>(*value = ptx::load_relaxed_system(word)); };
    return poll(load, [&](uint32_t seen) { return seen == epoch; }, epoch, peer, tag);
  }

  // Waits until 16 bytes end with exactly `epoch`. They are the whole message: orders no other memory.
  __device__ bool until_equal(const uint4* words, uint32_t epoch, int peer, WaitTag tag, uint4* value) const {
    const auto load = [&] { return (*value = ptx::load_relaxed_system(words)).w; };
    return poll(load, [&](uint32_t seen) { return seen == epoch; }, epoch, peer, tag);
  }

  // Waits until *counter, written by CTAs of this GPU, is `count`. Acquires at GPU scope.
  __device__ bool until_count(const uint32_t* counter, uint32_t count, WaitTag tag) const {
    const auto is_complete = [&](uint32_t seen) { return seen >= count; };
    return poll([&] { return ptx::load_acquire_gpu(counter); }, is_complete, count, rank_, tag);
  }

  // Waits until is_there() returns true. Polls lost() every kLooksPerAsk turns; a value other than 0 ends the wait
  // through lose(). `expected` goes into the record.
  template <typename IsThere, typename Lost>
  __device__ bool until(IsThere&& is_there, Lost&& lost, uint32_t expected, int peer, WaitTag tag) const {
    for (uint32_t i = 1; !is_there(); ++i) {
      if (i % kLooksPerAsk == 0) {
        if (const uint32_t found = lost()) return lose(found, peer, tag, expected);
      }
      if (expired()) return give_up(peer, tag, expected, 0);
    }
    return true;
  }

  // Gives up a wait at once, because the link has failed. Returns false. `lost` is 2 + the lost rank as faults name it.
  // That rank is published to all ranks of the domain, which may wait for this rank next. `lost` is 1 if the link
  // failed without a lost peer. Then nothing is published, so that ranks which wait for this one name this one.
  __device__ bool lose(uint32_t lost, int peer, WaitTag tag, uint32_t expected) const {
    if (!claim()) return false;
    if (lost >= 2) post_missed(control_, num_ranks_, rank_, static_cast<int>(lost) - 2);
    report_fault(record_, FaultKind::kTransport, kernel_, tag, rank_, lost >= 2 ? static_cast<int>(lost) - 2 : peer,
                 expected, 0);
    return false;
  }

  // Waits until a counter, to which other kernels or copy engines of this GPU add, has reached `count`. Acquires at
  // system scope. Returns false at the deadline and reports nothing: the caller's next wait does.
  __device__ bool until_raised(const uint32_t* counter, uint32_t count) const {
    while (!has_been_raised(counter, count)) {
      if (expired()) return false;
    }
    return true;
  }

  // Whether the counter has reached `count` already.
  static __device__ bool has_been_raised(const uint32_t* counter, uint32_t count) {
    return ptx::load_acquire_system(counter) >= count;
  }

  // Reports a FIFO that stayed full if `was_sent` is false. Returns `was_sent`.
  __device__ bool sends(bool was_sent, int peer) const { return was_sent || give_up(peer, WaitTag::kCommands, 0, 0); }

  // Records that the peer does not come: at the deadline, or where it cannot come any more. Returns false.
  __device__ bool give_up(int peer, WaitTag tag, uint32_t expected, uint32_t seen) const {
    note_missed(peer);
    if (!claim()) return false;
    const bool asks = control_ != nullptr && peer != rank_;
    const int culprit = asks ? find_culprit(control_, num_ranks_, rank_, peer) : peer;
    report_timeout(record_, kernel_, tag, rank_, culprit, expected, seen, culprit == peer ? -1 : peer);
    return false;
  }

  __device__ bool expired() const { return ptx::clock_ns() > deadline_; }

  // Whether this rank has published one that it waits for.
  __device__ bool has_missed() const {
    return control_ != nullptr && ptx::load_relaxed_gpu(&control_[rank_]->missed[rank_]) != 0u;
  }

  // Withdraws the rank of has_missed(), once a call has succeeded: that rank was only late, and must not be named when
  // another one is lost. Called by one thread.
  __device__ void withdraw_missed() const {
    for (int r = 0; r < num_ranks_; ++r) ptx::store_release_system(&control_[r]->missed[rank_], 0u);
  }

 private:
  static constexpr uint32_t kLooksPerAsk = 64;

  // Loads 16 bytes until they have reached `epoch`. Writes them to *value, unless they hold a later epoch.
  template <typename Load>
  __device__ bool until_come(Load&& load, uint32_t epoch, int peer, WaitTag tag, uint4* value) const {
    const auto epoch_of = [&] {
      const uint4 seen = load();
      if (seen.w == epoch) *value = seen;
      return seen.w;
    };
    return poll(epoch_of, [&](uint32_t seen) { return has_reached_epoch(seen, epoch); }, epoch, peer, tag);
  }

  // Loads until is_enough() accepts the value. `expected` goes into the record.
  template <typename Load, typename IsEnough>
  __device__ bool poll(Load&& load, IsEnough&& is_enough, uint32_t expected, int peer, WaitTag tag) const {
    while (true) {
      const uint32_t seen = load();
      if (is_enough(seen)) return true;
      if (expired()) return give_up(peer, tag, expected, seen);
    }
  }

  // Only one wait of a kernel reports. Otherwise the host, which may clear the record at once, would find a second
  // fault of the same call.
  __device__ bool claim() const { return control_ == nullptr || atomicCAS(&control_[rank_]->failed, 0u, 1u) == 0u; }

  // Records a rank that this one has waited for in vain. Warps wait for several ranks at once, and some of these only
  // wait for the lost one. A wait that begins after the fault was written is not recorded.
  __device__ void note_missed(int peer) const {
    if (control_ == nullptr || peer == rank_ || ptx::load_acquire_system(&record_->written) != 0u) return;
    atomicOr_system(&record_->missed[peer / 32], 1u << peer % 32);
  }

  // NOTE: the functions below run only in a call that fails. They take values, so that a Waiter stays in registers.
  static __device__ __noinline__ void report_timeout(FaultRecord* record, KernelName kernel, WaitTag tag, int rank,
                                                     int peer, uint32_t expected, uint32_t seen, int witness) {
    report_fault(record, FaultKind::kTimeout, kernel, tag, rank, peer, expected, seen, witness);
  }

  // Publishes that this rank waits for `peer` in vain, or has lost it, unless it has already published a rank.
  static __device__ __noinline__ void post_missed(ControlBlock* const* control, int num_ranks, int rank, int peer) {
    const uint32_t word = static_cast<uint32_t>(peer) + 1;
    if (control == nullptr || atomicCAS(&control[rank]->missed[rank], 0u, word) != 0u) return;
    for (int r = 0; r < num_ranks; ++r) {
      if (r != rank) ptx::store_release_system(&control[r]->missed[rank], word);
    }
  }

  // Publishes that this rank waits for `peer`. Then follows the chain of published ranks from `peer`, for kListenNs.
  static __device__ __noinline__ int find_culprit(ControlBlock* const* control, int num_ranks, int rank, int peer) {
    post_missed(control, num_ranks, rank, peer);
    const uint32_t* missed = control[rank]->missed;
    const uint64_t end = ptx::clock_ns() + kListenNs;
    int culprit = peer;
    while (ptx::clock_ns() < end) {
      culprit = peer;
      for (int step = 0; step < num_ranks; ++step) {
        const int listed = culprit < num_ranks ? culprit : rank;
        const int next = static_cast<int>(ptx::load_acquire_system(&missed[listed])) - 1;
        if (next < 0 || next == rank) break;
        culprit = next;
        if (next >= num_ranks) break;  // of another domain, which publishes nothing here
      }
    }
    return culprit;
  }

  FaultRecord* record_;
  KernelName kernel_;
  int rank_;
  uint64_t deadline_;
  ControlBlock* const* control_;
  int num_ranks_;
};

}  // namespace hybrid_ep
