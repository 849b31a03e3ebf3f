#include "topology/distance.h"

#include <algorithm>

namespace hybrid_ep::topology {

const char* to_string(Distance distance) {
  switch (distance) {
    case Distance::kSelf:
      return "SELF";
    case Distance::kSwitch:
      return "PIX";
    case Distance::kSwitches:
      return "PXB";
    case Distance::kHostBridge:
      return "PHB";
    case Distance::kNumaNode:
      return "NODE";
    case Distance::kSystem:
      return "SYS";
  }
  return "SYS";
}

Distance distance_between(const PciDevice& a, const PciDevice& b, int num_numa_nodes) {
  if (a.address == b.address) return Distance::kSelf;
  const auto fork = std::mismatch(a.path.begin(), a.path.end(), b.path.begin(), b.path.end());
  const auto shared = fork.first - a.path.begin();
  const auto below = std::max(a.path.end() - fork.first, b.path.end() - fork.second);
  // path[0] is the host bridge, so two shared parts mean a shared bridge or switch port. A switch shows as one upstream
  // port with downstream ports below it: behind the same switch, each device has one downstream port of its own.
  if (shared >= 2) return below <= 2 ? Distance::kSwitch : Distance::kSwitches;
  if (shared == 1) return Distance::kHostBridge;
  if (num_numa_nodes == 1) return Distance::kNumaNode;
  return a.numa_node >= 0 && a.numa_node == b.numa_node ? Distance::kNumaNode : Distance::kSystem;
}

}  // namespace hybrid_ep::topology
