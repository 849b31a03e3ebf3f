#include "transport/verbs_device.h"

#include <arpa/inet.h>
#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "transport/link.h"

namespace hybrid_ep {
namespace {

class DeviceList {
 public:
  DeviceList() : list_(verbs_api().get_device_list(&num_)) {}
  ~DeviceList() {
    if (list_ != nullptr) verbs_api().free_device_list(list_);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  ibv_device** begin() const { return list_; }
  ibv_device** end() const { return list_ == nullptr ? nullptr : list_ + num_; }

 private:
  int num_ = 0;
  ibv_device** list_;
};

// True for InfiniBand and RoCE. EFA has no reliable connections; those of iWARP are not connected by GIDs.
bool has_reliable_connections(const ibv_device* device) { return device->transport_type == IBV_TRANSPORT_IB; }

bool query_port(ibv_context* context, int port, ibv_port_attr* attributes) {
  std::memset(attributes, 0, sizeof(*attributes));
  return verbs_api().query_port(context, static_cast<uint8_t>(port),
                                reinterpret_cast<_compat_ibv_port_attr*>(attributes)) == 0;
}

bool is_empty(const ibv_gid& gid) {
  static const ibv_gid none{};
  return std::memcmp(gid.raw, none.raw, sizeof(gid.raw)) == 0;
}

bool is_ipv4_mapped(const ibv_gid& gid) {
  static const uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, prefix, sizeof(prefix)) == 0;
}

bool is_link_local(const ibv_gid& gid) { return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80; }

// libibverbs reports the type only since rdma-core 31; the kernel has a file for each.
bool is_roce_v2(const std::string& device, int port, int idx) {
  std::ifstream file("/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) + "/gid_attrs/types/" +
                     std::to_string(idx));
  std::string type;
  std::getline(file, type);
  return type == "RoCE v2";
}

// Rates an address: the highest is taken; −1: not usable.
int rank_gid(const std::string& device, int port, int idx, const ibv_gid& gid, bool is_ethernet) {
  if (is_empty(gid)) return -1;
  if (!is_ethernet) return 0;
  if (!is_roce_v2(device, port, idx)) return 0;
  return is_ipv4_mapped(gid) ? 3 : is_link_local(gid) ? 1 : 2;
}

void choose_gid(VerbsDevice* device, const std::string& name, int wanted) {
  int best = -1;
  for (int idx = 0; idx < device->port.gid_tbl_len; ++idx) {
    if (wanted >= 0 && idx != wanted) continue;
    ibv_gid gid{};
    if (verbs_api().query_gid(device->context.get(), static_cast<uint8_t>(device->port_number), idx, &gid) != 0)
      continue;
    const int rank = rank_gid(name, device->port_number, idx, gid, device->port.link_layer == IBV_LINK_LAYER_ETHERNET);
    if (rank <= best) continue;
    best = rank;
    device->gid_index = idx;
    device->gid = gid;
  }
  if (best < 0) {
    throw LinkError(-1,
                    device->name + (wanted < 0 ? " has no GID" : " has no GID with index " + std::to_string(wanted)));
  }
}

void list_partitions(VerbsDevice* device, int wanted) {
  constexpr uint16_t kFullMember = 0x8000;
  for (int idx = 0; idx < device->port.pkey_tbl_len; ++idx) {
    uint16_t key = 0;
    const auto port = static_cast<uint8_t>(device->port_number);
    if (verbs_api().query_pkey(device->context.get(), port, idx, &key) != 0) continue;
    key = ntohs(key);
    if (wanted >= 0 ? idx == wanted && key != 0 : (key & kFullMember) != 0) device->partitions.push_back({idx, key});
  }
  if (!device->partitions.empty()) return;
  throw LinkError(-1, device->name + (wanted >= 0 ? " has no partition key with index " + std::to_string(wanted)
                                                  : " is a full member of no partition"));
}

}  // namespace

VerbsDevice open_verbs_device(const std::string& name, const VerbsOptions& options, int num_completions) {
  const VerbsApi& api = verbs_api();
  VerbsDevice device;
  device.port_number = options.port;
  device.name = name + " port " + std::to_string(options.port);
  std::string there;
  for (ibv_device* found : DeviceList()) {
    there += std::string(there.empty() ? "" : ", ") + api.get_device_name(found);
    if (name != api.get_device_name(found)) continue;
    if (!has_reliable_connections(found)) {
      throw LinkError(-1, "RDMA device '" + name +
                              "' has no reliable connections, as InfiniBand and RoCE have them; EFA has none: use "
                              "HYBRID_EP_TRANSPORT=libfabric there, and tcp elsewhere");
    }
    device.context.reset(api.open_device(found));
  }
  if (!device.context) {
    throw LinkError(-1, "RDMA device '" + name + "' cannot be opened; there are: " + (there.empty() ? "none" : there));
  }
  if (!query_port(device.context.get(), options.port, &device.port))
    throw LinkError(-1, device.name + " does not exist");
  if (device.port.state != IBV_PORT_ACTIVE) throw LinkError(-1, device.name + " is not active");
  choose_gid(&device, name, options.gid_index);
  list_partitions(&device, options.pkey_index);
  device.domain.reset(api.alloc_pd(device.context.get()));
  device.completions.reset(api.create_cq(device.context.get(), num_completions, nullptr, nullptr, 0));
  if (!device.domain || !device.completions) {
    throw LinkError(-1, device.name + ": no protection domain or completion queue: " + std::strerror(errno));
  }
  const int file = device.context->async_fd;
  (void)fcntl(file, F_SETFL, fcntl(file, F_GETFL) | O_NONBLOCK);
  return device;
}

VerbsOwner<ibv_mr> register_memory(const VerbsDevice& device, void* memory, size_t num_bytes, bool relaxed_ordering) {
  const VerbsApi& api = verbs_api();
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if (relaxed_ordering && api.reg_mr_iova2 != nullptr) {
    // An optional flag: a device that does not know it ignores it.
    return VerbsOwner<ibv_mr>(api.reg_mr_iova2(device.domain.get(), memory, num_bytes,
                                               reinterpret_cast<uintptr_t>(memory),
                                               static_cast<unsigned>(kAccess) | IBV_ACCESS_RELAXED_ORDERING));
  }
  return VerbsOwner<ibv_mr>(api.reg_mr(device.domain.get(), memory, num_bytes, kAccess));
}

VerbsOwner<ibv_mr> register_dmabuf(const VerbsDevice& device, const DmaBuf& buffer, bool relaxed_ordering) {
  const VerbsApi& api = verbs_api();
  errno = ENOSYS;
  if (api.reg_dmabuf_mr == nullptr) return nullptr;
  const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                     (relaxed_ordering ? static_cast<int>(IBV_ACCESS_RELAXED_ORDERING) : 0);
  return VerbsOwner<ibv_mr>(
      api.reg_dmabuf_mr(device.domain.get(), buffer.offset, buffer.num_bytes, buffer.address, buffer.file, access));
}

std::vector<std::string> active_verbs_devices(int port) {
  std::vector<std::string> names;
  for (ibv_device* found : DeviceList()) {
    if (!has_reliable_connections(found)) continue;
    const VerbsOwner<ibv_context> context(verbs_api().open_device(found));
    ibv_port_attr attributes{};
    if (context && query_port(context.get(), port, &attributes) && attributes.state == IBV_PORT_ACTIVE) {
      names.emplace_back(verbs_api().get_device_name(found));
    }
  }
  return names;
}

}  // namespace hybrid_ep
