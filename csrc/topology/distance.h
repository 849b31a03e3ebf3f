// How far apart two PCI devices are, in the six steps that the field knows from `nvidia-smi topo`.
#pragma once

#include "topology/sysfs.h"

namespace hybrid_ep::topology {

enum class Distance {
  kSelf,        // the same function
  kSwitch,      // PIX: at most one PCIe switch between them
  kSwitches,    // PXB: several switches, no host bridge
  kHostBridge,  // PHB: through one host bridge
  kNumaNode,    // NODE: through host bridges of one NUMA node
  kSystem,      // SYS: across NUMA nodes, or nothing reports that it is nearer
};

const char* to_string(Distance distance);

// `num_numa_nodes` decides where the firmware gives no node: a host with a single one cannot be crossed.
Distance distance_between(const PciDevice& a, const PciDevice& b, int num_numa_nodes);

}  // namespace hybrid_ep::topology
