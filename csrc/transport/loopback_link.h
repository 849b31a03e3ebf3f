// Domains that are parts of one host, in host memory: chunks are copied from window to window. For tests without a GPU.
#pragma once

#include <memory>

#include "transport/link.h"

namespace hybrid_ep {

// Makes a link whose window peers map through /proc.
std::unique_ptr<Link> make_loopback_link(const LinkLayout& layout);

}  // namespace hybrid_ep
