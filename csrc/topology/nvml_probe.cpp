#include "topology/nvml_probe.h"

#include <nvml.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <stdexcept>

#include "topology/text.h"

// Younger than the oldest driver that we run on: the loader leaves them null there instead of refusing the module.
extern "C" {
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t, nvmlGpuFabricInfoV_t*) __attribute__((weak));
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t, nvmlGpuFabricInfo_t*) __attribute__((weak));
nvmlReturn_t nvmlDeviceGetPlatformInfo(nvmlDevice_t, nvmlPlatformInfo_t*) __attribute__((weak));
}

namespace hybrid_ep::topology {
namespace {

// Keeps NVML open for the length of one probe.
class Session {
 public:
  Session() {
    const nvmlReturn_t status = nvmlInit_v2();
    if (status != NVML_SUCCESS) throw std::runtime_error(nvmlErrorString(status));
  }
  ~Session() { nvmlShutdown(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

// NVML writes "00000000:18:00.0"; /sys writes "0000:18:00.0", with more digits only where the domain needs them.
std::string sysfs_address(std::string bus_id) {
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(), [](unsigned char c) { return std::tolower(c); });
  bus_id = printable(bus_id);
  return bus_id.rfind("0000", 0) == 0 && bus_id.find(':') == 8 ? bus_id.substr(4) : bus_id;
}

const char* device_type(nvmlIntNvLinkDeviceType_t type) {
  switch (type) {
    case NVML_NVLINK_DEVICE_TYPE_GPU:
      return "gpu";
    case NVML_NVLINK_DEVICE_TYPE_SWITCH:
      return "switch";
    case NVML_NVLINK_DEVICE_TYPE_IBMNPU:
      return "npu";
    default:
      return "unknown";
  }
}

// Links are numbered without gaps; NVML_NVLINK_MAX_LINKS is more than any GPU has, so the first refusal ends the list.
std::vector<NvLink> read_links(nvmlDevice_t device) {
  std::vector<NvLink> links;
  for (unsigned link = 0; link < NVML_NVLINK_MAX_LINKS; ++link) {
    nvmlEnableState_t active = NVML_FEATURE_DISABLED;
    if (nvmlDeviceGetNvLinkState(device, link, &active) != NVML_SUCCESS) break;
    NvLink found;
    found.link = static_cast<int>(link);
    found.active = active == NVML_FEATURE_ENABLED;
    nvmlIntNvLinkDeviceType_t type = NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    if (found.active && nvmlDeviceGetNvLinkRemoteDeviceType(device, link, &type) == NVML_SUCCESS) {
      found.remote_type = device_type(type);
    }
    nvmlPciInfo_t pci{};
    if (found.active && nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &pci) == NVML_SUCCESS) {
      constexpr unsigned kHidden = 0xffffffff;  // the hypervisor keeps the switch to itself
      if (pci.domain != kHidden) found.remote_pci = sysfs_address(pci.busId);
    }
    links.push_back(std::move(found));
  }
  return links;
}

// Fills `info` from whichever of the two functions the driver has.
nvmlReturn_t ask_fabric(nvmlDevice_t device, nvmlGpuFabricInfo_t* info) {
  if (nvmlDeviceGetGpuFabricInfoV != nullptr) {
    nvmlGpuFabricInfoV_t versioned{};
    versioned.version = nvmlGpuFabricInfo_v2;
    const nvmlReturn_t status = nvmlDeviceGetGpuFabricInfoV(device, &versioned);
    std::memcpy(info->clusterUuid, versioned.clusterUuid, sizeof info->clusterUuid);
    info->status = versioned.status;
    info->cliqueId = versioned.cliqueId;
    info->state = versioned.state;
    return status;
  }
  // Deprecated since CUDA 13.1; older drivers have nothing else.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  if (nvmlDeviceGetGpuFabricInfo != nullptr) return nvmlDeviceGetGpuFabricInfo(device, info);
#pragma GCC diagnostic pop
  return NVML_ERROR_FUNCTION_NOT_FOUND;
}

std::optional<Fabric> read_fabric(nvmlDevice_t device) {
  nvmlGpuFabricInfo_t info{};
  if (ask_fabric(device, &info) != NVML_SUCCESS) return std::nullopt;
  if (info.state == NVML_GPU_FABRIC_STATE_NOT_SUPPORTED) return std::nullopt;
  Fabric fabric;
  for (const unsigned char byte : info.clusterUuid) {
    constexpr char kDigits[] = "0123456789abcdef";
    fabric.cluster_uuid += kDigits[byte >> 4];
    fabric.cluster_uuid += kDigits[byte & 15];
  }
  fabric.clique = info.cliqueId;
  fabric.state = info.state;
  fabric.status = static_cast<int>(info.status);
  return fabric;
}

std::optional<Platform> read_platform(nvmlDevice_t device) {
  if (nvmlDeviceGetPlatformInfo == nullptr) return std::nullopt;
  nvmlPlatformInfo_t info{};
  info.version = nvmlPlatformInfo_v2;
  if (nvmlDeviceGetPlatformInfo(device, &info) != NVML_SUCCESS) return std::nullopt;
  const auto* serial = reinterpret_cast<const char*>(info.chassisSerialNumber);
  return Platform{printable(std::string(serial, strnlen(serial, sizeof info.chassisSerialNumber))), info.slotNumber,
                  info.trayIndex, info.hostId, info.moduleId};
}

Gpu read_gpu(nvmlDevice_t device, int gpu_idx) {
  Gpu gpu;
  gpu.gpu_idx = gpu_idx;
  char text[NVML_DEVICE_NAME_V2_BUFFER_SIZE] = {};
  if (nvmlDeviceGetName(device, text, sizeof text) == NVML_SUCCESS) gpu.name = printable(text);
  if (nvmlDeviceGetUUID(device, text, sizeof text) == NVML_SUCCESS) gpu.uuid = printable(text);
  nvmlPciInfo_t pci{};
  if (nvmlDeviceGetPciInfo_v3(device, &pci) == NVML_SUCCESS) gpu.pci_address = sysfs_address(pci.busId);
  nvmlMemory_t memory{};
  if (nvmlDeviceGetMemoryInfo(device, &memory) == NVML_SUCCESS) gpu.memory_bytes = memory.total;
  gpu.links = read_links(device);
  gpu.fabric = read_fabric(device);
  gpu.platform = read_platform(device);
  return gpu;
}

}  // namespace

NvmlNode probe_nvml() {
  const Session session;
  NvmlNode node;
  char text[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE] = {};
  if (nvmlSystemGetDriverVersion(text, sizeof text) == NVML_SUCCESS) node.driver_version = printable(text);
  if (nvmlSystemGetNVMLVersion(text, sizeof text) == NVML_SUCCESS) node.nvml_version = printable(text);
  nvmlSystemGetCudaDriverVersion_v2(&node.cuda_driver_version);
  unsigned count = 0;
  const nvmlReturn_t status = nvmlDeviceGetCount_v2(&count);
  if (status != NVML_SUCCESS) throw std::runtime_error(nvmlErrorString(status));
  constexpr unsigned kMostGpus = 64;  // of one node; a count beyond that is garbage
  std::vector<nvmlDevice_t> handles;
  for (unsigned i = 0; i < std::min(count, kMostGpus); ++i) {
    nvmlDevice_t device = nullptr;
    if (nvmlDeviceGetHandleByIndex_v2(i, &device) != NVML_SUCCESS) continue;  // lost: the doctor names it
    handles.push_back(device);
    node.gpus.push_back(read_gpu(device, static_cast<int>(i)));
  }
  for (size_t i = 0; i < handles.size(); ++i) {
    for (size_t j = 0; j < handles.size(); ++j) {
      nvmlGpuP2PStatus_t peer = NVML_P2P_STATUS_UNKNOWN;
      if (i == j || nvmlDeviceGetP2PStatus(handles[i], handles[j], NVML_P2P_CAPS_INDEX_NVLINK, &peer) != NVML_SUCCESS) {
        continue;
      }
      if (peer == NVML_P2P_STATUS_OK) node.gpus[i].nvlink_peers.push_back(node.gpus[j].gpu_idx);
    }
  }
  return node;
}

}  // namespace hybrid_ep::topology
