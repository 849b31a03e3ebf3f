// What NVML reports about the GPUs of this node: the part of the topology that only the driver knows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hybrid_ep::topology {

struct NvLink {
  int link = 0;
  bool active = false;
  std::string remote_type;  // "gpu", "switch", "npu" or "unknown"; empty where NVML does not report it
  std::string remote_pci;   // PCI address of the other end, where NVML reports it
};

struct Fabric {
  std::string cluster_uuid;  // 32 hexadecimal digits; all zero: not part of a multi-node domain
  uint32_t clique = 0;
  int state = 0;   // NVML_GPU_FABRIC_STATE_*; 3 = completed
  int status = 0;  // an nvmlReturn_t; meaningful when completed
};

// Where a rack puts the GPU, on platforms that know (NVL72).
struct Platform {
  std::string chassis_serial;
  int slot = 0;       // in the chassis, switches included
  int tray = 0;       // among the compute trays
  int host_id = 0;    // node within the slot
  int module_id = 0;  // GPU within the node
};

struct Gpu {
  int gpu_idx = 0;
  std::string name;
  std::string uuid;
  std::string pci_address;  // in the form that /sys uses
  uint64_t memory_bytes = 0;
  std::vector<NvLink> links;
  std::optional<Fabric> fabric;      // none where the driver or the GPU has no fabric
  std::optional<Platform> platform;  // none where the platform does not report it
  std::vector<int> nvlink_peers;     // gpu_idx of the GPUs that NVML calls reachable over NVLink
};

struct NvmlNode {
  std::string driver_version;
  std::string nvml_version;
  int cuda_driver_version = 0;  // 13000 = 13.0
  std::vector<Gpu> gpus;
};

// Asks NVML once and shuts it down again. Throws std::runtime_error with NVML's own words when it does not start.
NvmlNode probe_nvml();

}  // namespace hybrid_ep::topology
