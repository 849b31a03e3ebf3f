// The transport for networks without RDMA. Window and words are in pinned host memory. Kernels write and read them over
// PCIe, and sockets use the same memory as staging.
#pragma once

#include <memory>
#include <string>

#include "transport/link.h"

namespace hybrid_ep {

struct TcpOptions {
  std::string host;         // the numeric address at which peers reach this rank
  int num_connections = 4;  // per peer
  double timeout_s = 100;   // a peer that is silent for half of it is lost
};

std::unique_ptr<Link> make_tcp_link(const LinkLayout& layout, const TcpOptions& options);

}  // namespace hybrid_ep
