// The first error of a transport: recorded once, read by kernels as a word and by the host as text.
#pragma once

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

class FailureReport {
 public:
  FailureReport() : flag_(allocate_pinned(sizeof(uint32_t))) {}

  // Any thread. Later failures are dropped.
  void report(LinkFailure failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    __atomic_store_n(flag(), failure_word(failure_->peer), __ATOMIC_RELEASE);
  }
  bool has_failed() const { return __atomic_load_n(flag(), __ATOMIC_ACQUIRE) != 0; }
  std::optional<LinkFailure> get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }
  // Pinned: failure_word.
  uint32_t* flag() const { return reinterpret_cast<uint32_t*>(flag_.get()); }

 private:
  Memory flag_;
  mutable std::mutex mutex_;
  std::optional<LinkFailure> failure_;
};

}  // namespace hybrid_ep
