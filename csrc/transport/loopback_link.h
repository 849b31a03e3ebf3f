// Domains that are parts of one host: chunks are copied from window to window. For tests, and for measuring a machine
// without a NIC.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/copy_queue.h"
#include "transport/link.h"

namespace hybrid_ep {

// Where windows and words are, by domain, as this process maps them. Empty: each link makes its own in host memory,
// which its peers map through /proc.
struct LoopbackMemory {
  std::vector<uintptr_t> windows, words;
};

std::unique_ptr<Link> make_loopback_link(const LinkLayout& layout, const LoopbackMemory& memory);

}  // namespace hybrid_ep
