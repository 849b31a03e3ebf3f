// A link as a kernel sees it: pointers and shapes, passed by value as a part of the kernel's parameters.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "layout/link_layout.h"
#include "transport/fifo.h"

namespace hybrid_ep {

// The failure word of a link, which kernels read. `peer` is the domain index of the lost peer; −1: no single peer is
// the cause. 0 is no failure.
HYBRID_EP_HOST_DEVICE constexpr uint32_t failure_word(int peer) { return static_cast<uint32_t>(peer + 2); }

struct LinkView {
  LinkLayout layout;
  uint8_t* window;          // this rank's; GPU memory or pinned host memory, as the transport chose
  uint64_t* words;          // this rank's flags and credits; written by peers, loaded by kernels with acquire
  const uint32_t* failure;  // pinned: failure_word; the host has the whole record
  FifoView fifos;
  // If is_mapped, kernels write their peers' windows themselves and give no commands. `windows` has the window of each
  // domain as this GPU maps it, with its words behind it. With NVSHMEM, `pes` has the peers' PEs, and the window of a
  // peer that this GPU does not map is nullptr.
  bool is_mapped;
  uint8_t* windows[kMaxDomains];
  int pes[kMaxDomains];
  // Limit a link to the rate of a NIC: the time of a byte (0: no limit), and a word of this GPU with the time, by
  // clock_ns(), at which the chunks given so far have crossed.
  float ns_per_byte;
  uint64_t* crossed_at;
};

}  // namespace hybrid_ep
