// libfabric, loaded at run time, and one NIC of a rank: its endpoint opened, its memory registered.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <memory>
#include <string>

#include "transport/fabric_link.h"

namespace hybrid_ep {

// The library's symbols. Its other functions are inline: they call through the objects' own tables.
struct FabricApi {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
};

// Loads the library once. Throws LinkError with the loader's message where it is not there.
const FabricApi& fabric_api();

struct FabricDelete {
  void operator()(fi_info* info) const { fabric_api().freeinfo(info); }
  template <typename T>
  void operator()(T* object) const {
    fi_close(&object->fid);
  }
};
template <typename T>
using FabricOwner = std::unique_ptr<T, FabricDelete>;

struct FabricDevice {
  std::string name;
  // In the order of their making: what is below is closed before what is above.
  FabricOwner<fi_info> info;
  FabricOwner<fid_fabric> fabric;
  FabricOwner<fid_domain> domain;
  FabricOwner<fid_av> peers;
  FabricOwner<fid_cq> completions;
  FabricOwner<fid_ep> endpoint;
  FabricOwner<fid_mr> window, words, staged;
  int descriptor = -1;  // of the completion queue; −1: it has none
  uint64_t next_key = 1;
};

// Says what libfabric could not do: `status` is negative.
std::string fabric_error(const std::string& what, ssize_t status);
// Throws LinkError that says so if the status is negative.
void check_fabric(const std::string& what, ssize_t status);

// The provider's interfaces with reliable datagrams that write to peers' memory; nothing if it has none.
FabricOwner<fi_info> find_fabric(const FabricOptions& options, bool uses_gpu_memory);
// Opens the interface of that name, or the first one. Throws LinkError that names those that are there.
FabricDevice open_fabric_device(const fi_info* found, const std::string& name, size_t num_peers, size_t num_arrivals);
// Registers memory for peers to write, and to be sent: of a GPU, or of the host if `gpu` is −1. Returns the status. The
// provider exports GPU memory as a dma-buf, or uses nvidia-peermem.
int register_fabric_memory(FabricDevice& device, void* memory, size_t num_bytes, int gpu, FabricOwner<fid_mr>* region);

}  // namespace hybrid_ep
