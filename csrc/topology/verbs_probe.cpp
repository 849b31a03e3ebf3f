#include "topology/verbs_probe.h"

#include <infiniband/verbs.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace hybrid_ep::topology {
namespace {

int mtu_bytes(ibv_mtu mtu) { return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128 << mtu : 0; }

const char* port_state(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "DOWN";
    case IBV_PORT_INIT:
      return "INIT";
    case IBV_PORT_ARMED:
      return "ARMED";
    case IBV_PORT_ACTIVE:
      return "ACTIVE";
    case IBV_PORT_ACTIVE_DEFER:
      return "ACTIVE_DEFER";
    default:
      return "NOP";
  }
}

// Registers a dma-buf that does not exist. A driver that knows dma-buf looks the descriptor up and returns EBADF; one
// that does not returns that the operation is not supported. Nothing is registered either way.
std::optional<bool> registers_dmabuf(ibv_context* context) {
  const std::unique_ptr<ibv_pd, int (*)(ibv_pd*)> domain(ibv_alloc_pd(context), &ibv_dealloc_pd);
  if (!domain) return std::nullopt;
  constexpr size_t kLength = 4096;
  constexpr int kNoDescriptor = -1;
  errno = 0;
  ibv_mr* region = ibv_reg_dmabuf_mr(domain.get(), 0, kLength, 0, kNoDescriptor, IBV_ACCESS_LOCAL_WRITE);
  if (region != nullptr) {
    ibv_dereg_mr(region);
    return true;
  }
  if (errno == EBADF) return true;
  if (errno == EOPNOTSUPP || errno == EPROTONOSUPPORT || errno == ENOSYS) return false;
  return std::nullopt;
}

VerbsDevice read_device(ibv_device* device) {
  VerbsDevice found;
  found.name = ibv_get_device_name(device);
  const std::unique_ptr<ibv_context, int (*)(ibv_context*)> context(ibv_open_device(device), &ibv_close_device);
  if (!context) return found;
  ibv_device_attr attributes{};
  if (ibv_query_device(context.get(), &attributes) != 0) return found;
  found.firmware = attributes.fw_ver;
  found.max_qp = attributes.max_qp;
  found.max_mr_bytes = attributes.max_mr_size;
  for (int port = 1; port <= attributes.phys_port_cnt; ++port) {
    ibv_port_attr seen{};
    if (ibv_query_port(context.get(), static_cast<uint8_t>(port), &seen) != 0) continue;
    VerbsPort result;
    result.port = port;
    result.state = port_state(seen.state);
    result.link_layer = seen.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
    result.active_mtu_bytes = mtu_bytes(seen.active_mtu);
    result.max_mtu_bytes = mtu_bytes(seen.max_mtu);
    result.lid = seen.lid;
    result.sm_lid = seen.sm_lid;
    found.ports.push_back(std::move(result));
  }
  found.dmabuf = registers_dmabuf(context.get());
  return found;
}

}  // namespace

std::vector<VerbsDevice> probe_verbs() {
  int count = 0;
  const std::unique_ptr<ibv_device*, void (*)(ibv_device**)> list(ibv_get_device_list(&count), &ibv_free_device_list);
  if (!list) {
    if (errno == ENOSYS) return {};  // a kernel without RDMA: no devices, not a fault
    throw std::runtime_error(std::string("ibv_get_device_list: ") + std::strerror(errno));
  }
  std::vector<VerbsDevice> devices;
  for (int i = 0; i < count; ++i) devices.push_back(read_device(list.get()[i]));
  return devices;
}

}  // namespace hybrid_ep::topology
