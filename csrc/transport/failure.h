// The first error of a transport: recorded once, read by kernels as a word and by the host as text.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "transport/link_view.h"
#include "transport/memory.h"

namespace hybrid_ep {

struct LinkFailure {
  int peer;            // domain index of the peer that was lost; −1 if no single peer is the cause
  std::string device;  // the NIC or socket that reported it
  std::string detail;  // its message
};

// The loss of a peer ends the whole link, unless the link has been told to keep the others.
class FailureReport {
 public:
  FailureReport() : flag_(allocate_pinned(sizeof(uint32_t))) {}

  // From now on the loss of a peer is no failure of the link. Kernels wait for the peer until their deadline, so that
  // all ranks name it at the same time.
  void keep_other_peers() { keeps_others_ = true; }

  // Records a failure; later ones are dropped. Called by any thread.
  void report(LinkFailure failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure.peer >= 0) has_lost_[failure.peer] = true;
    if (failure.peer >= 0 && keeps_others_) return;
    if (failure_) return;
    failure_ = std::move(failure);
    __atomic_store_n(flag(), failure_word(failure_->peer), __ATOMIC_RELEASE);
  }
  bool has_failed() const { return __atomic_load_n(flag(), __ATOMIC_ACQUIRE) != 0; }
  // Whether a peer was lost, so that nothing can be sent to it. Called by any thread.
  bool has_lost(int peer) const { return has_lost_[peer]; }
  std::optional<LinkFailure> get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }
  // Pinned: failure_word.
  uint32_t* flag() const { return reinterpret_cast<uint32_t*>(flag_.get()); }

 private:
  Memory flag_;
  mutable std::mutex mutex_;
  std::atomic<bool> keeps_others_{false}, has_lost_[kMaxDomains]{};
  std::optional<LinkFailure> failure_;
};

}  // namespace hybrid_ep
