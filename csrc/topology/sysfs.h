// What the kernel reports about PCI devices, NUMA nodes and RDMA NICs, read from /sys below a root directory.
//
// Nothing here needs a driver library, so it works on every Linux, on a recorded node and on a simulated one. A file
// that is missing or unreadable is a normal answer: the field keeps its "not known" value.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace hybrid_ep::topology {

// A number that a file should hold and does not, where −1 has a meaning of its own.
inline constexpr int kUnreadable = -2;

// The PCIe link that a function hangs at, as it trained and as this end of it could; 0 where not known.
struct PciLink {
  int width = 0;
  int max_width = 0;
  double gts = 0;  // GT/s per lane: 32 is generation 5
  double max_gts = 0;
};

// A PCI function of interest: an NVIDIA GPU, an RDMA NIC's function, or a bridge.
struct PciDevice {
  std::string address;  // "0000:18:00.0": domain of four digits, lower case
  int vendor = -1;      // 0x10de is NVIDIA
  int device_id = -1;
  int class_code = -1;            // base class and subclass, e.g. 0x0302 for a 3D controller
  int numa_node = -1;             // −1: the firmware does not report it; kUnreadable: the file could not be read
  std::vector<std::string> path;  // host bridge first, the device itself last; only itself where /sys hides the tree
  PciLink link;
};

bool is_gpu(const PciDevice& device);
bool is_bridge(const PciDevice& device);

struct NicPort {
  int port = 0;
  std::string state;       // "ACTIVE", "DOWN", …; empty where unreadable
  std::string phys_state;  // "LinkUp", "Disabled", …
  std::string link_layer;  // "InfiniBand" or "Ethernet"
  double rate_gbps = 0;    // 0: not known
  int sm_lid = -1;         // −1: not known; 0 on Ethernet
};

struct Nic {
  std::string name;         // RDMA device, e.g. "mlx5_0"
  std::string pci_address;  // empty for a device without PCI function (Soft-RoCE)
  int numa_node = -1;
  std::string node_guid;
  std::string firmware;
  std::vector<std::string> netdevs;
  std::vector<NicPort> ports;
};

// GPUs (vendor 0x10de, class 0x0300 or 0x0302), NICs' functions and bridges, ordered by address; NVIDIA functions whose
// class cannot be read as well.
std::vector<PciDevice> scan_pci(const std::filesystem::path& sysroot);

// Every device of class/infiniband, ordered by name with numbers compared as numbers (mlx5_2 before mlx5_10).
std::vector<Nic> scan_nics(const std::filesystem::path& sysroot);

// NUMA nodes that are online with their CPUs ("0-55,112-167"); empty where /sys does not have it.
std::map<int, std::string> scan_numa_nodes(const std::filesystem::path& sysroot);

}  // namespace hybrid_ep::topology
