// The transport for networks without RDMA. Window and words lie in pinned host memory, where kernels write and read
// them over PCIe: it is also the staging that sockets need.
#pragma once

#include <memory>
#include <string>

#include "transport/link.h"

namespace hybrid_ep {

struct TcpOptions {
  std::string host;         // the numeric address at which peers reach this rank
  int num_connections = 4;  // per peer
  double timeout_s = 100;   // half of it after which a silent peer is lost
};

std::unique_ptr<Link> make_tcp_link(const LinkLayout& layout, const TcpOptions& options);

}  // namespace hybrid_ep
