// One NIC of a rank: opened, its memory registered, its port and address chosen.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/memory.h"
#include "transport/verbs_api.h"
#include "transport/verbs_link.h"

namespace hybrid_ep {

// Frees what libibverbs has made, by the function that belongs to it.
struct VerbsDelete {
  void operator()(ibv_context* context) const { verbs_api().close_device(context); }
  void operator()(ibv_pd* domain) const { verbs_api().dealloc_pd(domain); }
  void operator()(ibv_mr* region) const { verbs_api().dereg_mr(region); }
  void operator()(ibv_cq* queue) const { verbs_api().destroy_cq(queue); }
  void operator()(ibv_qp* pair) const { verbs_api().destroy_qp(pair); }
};
template <typename T>
using VerbsOwner = std::unique_ptr<T, VerbsDelete>;

// An entry of a port's table of partition keys.
struct Partition {
  int idx;
  uint16_t key;
};

struct VerbsDevice {
  std::string name;  // with its port, for people
  VerbsOwner<ibv_context> context;
  VerbsOwner<ibv_pd> domain;
  VerbsOwner<ibv_mr> window, words, staged;  // staged: words of an unordered network, and goodbyes
  VerbsOwner<ibv_cq> completions;
  ibv_port_attr port{};
  int port_number = 1;
  int gid_index = 0;
  ibv_gid gid{};
  std::vector<Partition> partitions;  // that may be used: those with full membership, or the one that is asked for
};

// Opens a device without memory. Throws LinkError that names what is there.
VerbsDevice open_verbs_device(const std::string& name, const VerbsOptions& options, int num_completions);

// Registers memory for peers to write. Returns nothing where the device does not take it; errno has the reason.
VerbsOwner<ibv_mr> register_memory(const VerbsDevice& device, void* memory, size_t num_bytes, bool relaxed_ordering);
// Registers GPU memory, by its dma-buf, for peers to write.
VerbsOwner<ibv_mr> register_dmabuf(const VerbsDevice& device, const DmaBuf& buffer, bool relaxed_ordering);

}  // namespace hybrid_ep
