#include "transport/fabric_device.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <type_traits>

namespace hybrid_ep {
namespace {

constexpr uint32_t kApiVersion = FI_VERSION(1, 15);  // of Cray's libraries; EFA's are newer

FabricApi load() {
  void* library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw LinkError(-1, std::string("libfabric cannot be loaded: ") + dlerror());
  FabricApi api{};
  const auto find = [library](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) throw LinkError(-1, std::string("libfabric.so.1 has no ") + name);
  };
  find("fi_getinfo", &api.getinfo);
  find("fi_freeinfo", &api.freeinfo);
  find("fi_dupinfo", &api.dupinfo);
  find("fi_fabric", &api.fabric);
  find("fi_strerror", &api.strerror);
  return api;
}

// Provider shm makes a file of this name in /dev/shm. It would name the file by the process's number, and that file is
// still there if an earlier process of that number was killed, or belongs to another container that shares /dev/shm.
std::string unique_name() {
  std::random_device random;
  return "hybrid_ep-" + std::to_string(uint64_t{random()} << 32 | random());
}

// The NIC's name as the kernel has it, if the provider tells; otherwise the domain's.
std::string device_name(const fi_info& info) {
  const bool has_nic =
      info.nic != nullptr && info.nic->device_attr != nullptr && info.nic->device_attr->name != nullptr;
  return has_nic ? info.nic->device_attr->name : info.domain_attr->name;
}

std::vector<std::string> names_of(const fi_info* infos) {
  std::vector<std::string> names;
  for (const fi_info* info = infos; info != nullptr; info = info->next) {
    const std::string name = device_name(*info);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

// Of several addresses of a NIC an IPv4 one is taken.
const fi_info* find_device(const fi_info* infos, const std::string& name) {
  const fi_info* best = nullptr;
  for (const fi_info* info = infos; info != nullptr; info = info->next) {
    if (!name.empty() && name != device_name(*info) && name != info->domain_attr->name) continue;
    if (best == nullptr || (best->addr_format != FI_SOCKADDR_IN && info->addr_format == FI_SOCKADDR_IN)) best = info;
  }
  return best;
}

}  // namespace

const FabricApi& fabric_api() {
  static const FabricApi api = load();
  return api;
}

std::string fabric_error(const std::string& what, ssize_t status) {
  return what + ": " + fabric_api().strerror(static_cast<int>(-status));
}

void check_fabric(const std::string& what, ssize_t status) {
  if (status < 0) throw LinkError(-1, "libfabric: " + fabric_error(what, status));
}

FabricOwner<fi_info> find_fabric(const FabricOptions& options, bool uses_gpu_memory) {
  const FabricApi& api = fabric_api();
  const FabricOwner<fi_info> hints(api.dupinfo(nullptr));
  hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE | (uses_gpu_memory ? FI_HMEM : 0);
  hints->ep_attr->type = FI_EP_RDM;
  hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_NONE;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->cq_data_size = options.has_remote_data ? sizeof(uint32_t) : 0;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT |
                                (uses_gpu_memory ? FI_MR_HMEM : 0);
  hints->fabric_attr->prov_name = strdup(options.provider.c_str());  // freed with the hints
  const std::string source = options.provider == "shm" ? unique_name() : options.host;
  fi_info* found = nullptr;
  const int status = api.getinfo(kApiVersion, source.empty() ? nullptr : source.c_str(), nullptr,
                                 source.empty() ? 0 : FI_SOURCE, hints.get(), &found);
  if (status != -FI_ENODATA) check_fabric("provider " + options.provider, status);
  return FabricOwner<fi_info>(found);
}

FabricDevice open_fabric_device(const fi_info* infos, const std::string& name, size_t num_peers, size_t num_arrivals) {
  const FabricApi& api = fabric_api();
  const fi_info* found = find_device(infos, name);
  if (found == nullptr) {
    std::string there;
    for (const std::string& other : names_of(infos)) there += (there.empty() ? "" : ", ") + other;
    throw LinkError(-1, "libfabric has no device '" + name + "' of this provider; it has: " + there);
  }
  FabricDevice device;
  device.name = device_name(*found);
  device.info.reset(api.dupinfo(found));
  fi_info* info = device.info.get();
  const auto make = [&device](const char* what, auto* owner, auto&& function) {
    typename std::remove_pointer_t<decltype(owner)>::pointer made = nullptr;
    const int status = function(&made);
    owner->reset(made);
    check_fabric(std::string(what) + " on " + device.name, status);
  };
  make("fi_fabric", &device.fabric, [&](fid_fabric** made) { return api.fabric(info->fabric_attr, made, nullptr); });
  make("fi_domain", &device.domain,
       [&](fid_domain** made) { return fi_domain(device.fabric.get(), info, made, nullptr); });
  fid_domain* domain = device.domain.get();
  fi_av_attr of_peers{};
  of_peers.type = FI_AV_TABLE;
  of_peers.count = num_peers;
  make("fi_av_open", &device.peers, [&](fid_av** made) { return fi_av_open(domain, &of_peers, made, nullptr); });
  fi_cq_attr of_queue{};
  of_queue.size = info->tx_attr->size + num_arrivals;
  of_queue.format = FI_CQ_FORMAT_DATA;
  make("fi_cq_open", &device.completions, [&](fid_cq** made) {
    of_queue.wait_obj = FI_WAIT_FD;
    if (fi_cq_open(domain, &of_queue, made, nullptr) == 0) return 0;
    of_queue.wait_obj = FI_WAIT_NONE;
    return fi_cq_open(domain, &of_queue, made, nullptr);
  });
  if (of_queue.wait_obj == FI_WAIT_FD) (void)fi_control(&device.completions->fid, FI_GETWAIT, &device.descriptor);
  make("fi_endpoint", &device.endpoint, [&](fid_ep** made) { return fi_endpoint(domain, info, made, nullptr); });
  fid_ep* endpoint = device.endpoint.get();
  check_fabric("fi_ep_bind", fi_ep_bind(endpoint, &device.peers->fid, 0));
  check_fabric("fi_ep_bind", fi_ep_bind(endpoint, &device.completions->fid, FI_TRANSMIT | FI_RECV));
  check_fabric("fi_enable on " + device.name, fi_enable(endpoint));
  return device;
}

int register_fabric_memory(FabricDevice& device, void* memory, size_t num_bytes, int gpu, FabricOwner<fid_mr>* region) {
  iovec range{memory, num_bytes};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = FI_WRITE | FI_REMOTE_WRITE;
  attributes.requested_key = device.next_key++;
  attributes.iface = gpu >= 0 ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
  attributes.device.cuda = std::max(gpu, 0);
  fid_mr* made = nullptr;
  int status = fi_mr_regattr(device.domain.get(), &attributes, 0, &made);
  region->reset(made);
  if (status == 0 && (device.info->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
    status = fi_mr_bind(made, &device.endpoint->fid, 0);
    if (status == 0) status = fi_mr_enable(made);
  }
  return status;
}

std::vector<std::string> fabric_devices(const std::string& provider) {
  (void)fabric_api();
  if (provider.empty()) return {};
  FabricOptions options;
  options.provider = provider;
  options.has_remote_data = false;
  const FabricOwner<fi_info> infos = find_fabric(options, false);
  if (!infos) throw LinkError(-1, "libfabric finds no network for provider " + provider + " here");
  return names_of(infos.get());
}

}  // namespace hybrid_ep
