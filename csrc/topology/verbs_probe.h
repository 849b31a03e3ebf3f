// What libibverbs reports about the RDMA devices of this node, beyond what /sys shows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hybrid_ep::topology {

struct VerbsPort {
  int port = 0;
  std::string state;       // "ACTIVE", "DOWN", … as in /sys
  std::string link_layer;  // "InfiniBand" or "Ethernet"
  int active_mtu_bytes = 0;
  int max_mtu_bytes = 0;
  int lid = 0;
  int sm_lid = 0;
};

struct VerbsDevice {
  std::string name;
  std::string firmware;
  int max_qp = 0;
  uint64_t max_mr_bytes = 0;
  std::optional<bool> dmabuf;  // whether the kernel driver registers dma-buf memory; none: unknown
  std::vector<VerbsPort> ports;
};

// A device that cannot be opened (for example, no permission) is listed with its name alone.
// Throws std::runtime_error where the device list itself cannot be read.
std::vector<VerbsDevice> probe_verbs();

}  // namespace hybrid_ep::topology
