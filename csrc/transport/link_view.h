// What a kernel gets of a link: pointers and shapes, passed by value as a part of its parameters.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "layout/link_layout.h"
#include "transport/fifo.h"

namespace hybrid_ep {

// A failure of a link in the word that kernels read: of the peer in a domain, or with −1 one without a
// single peer as its cause. 0 is none.
HYBRID_EP_HOST_DEVICE constexpr uint32_t failure_word(int peer) { return static_cast<uint32_t>(peer + 2); }

struct LinkView {
  LinkLayout layout;
  uint8_t* window;          // this rank's; GPU memory or pinned host memory, as the transport chose
  uint64_t* words;          // this rank's flags and credits; written by peers, loaded by kernels with acquire
  const uint32_t* failure;  // pinned: failure_word; the host has the whole record
  FifoView fifos;
  // Peers' windows by domain, as this GPU maps them, each with its words behind it. Where is_mapped, kernels write them
  // themselves and give no commands.
  bool is_mapped;
  uint8_t* windows[kMaxDomains];
};

}  // namespace hybrid_ep
