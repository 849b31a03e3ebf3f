// What a kernel gets of a link: pointers and shapes, passed by value as a part of its parameters.
#pragma once

#include <cstdint>

#include "layout/link_layout.h"
#include "transport/fifo.h"

namespace hybrid_ep {

struct LinkView {
  LinkLayout layout;
  uint8_t* window;             // this rank's; GPU memory or pinned host memory, as the transport chose
  uint64_t* words;             // this rank's flags and credits; written by peers, read by kernels
  const uint32_t* has_failed;  // pinned: not 0 once the transport has lost a peer or a NIC; it says why to the host
  FifoView fifos;
  // Peers' windows by domain, as this GPU maps them, each with its words behind it. Where is_mapped, kernels write them
  // themselves and give no commands.
  bool is_mapped;
  uint8_t* windows[kMaxDomains];
};

}  // namespace hybrid_ep
