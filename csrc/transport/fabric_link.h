// The transport for networks without reliable connections, as AWS' EFA and HPE's Slingshot: reliable datagrams over
// libfabric, which keep no order. A put is two writes with remote completion data, which is the immediate of
// arrivals.h. Some providers have no such data with writes. There the chunk's word is written after the chunk has been
// delivered.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/link.h"

namespace hybrid_ep {

// Whether the transport was compiled; otherwise (fabric_absent.cpp) the functions here throw LinkError.
extern const bool kHasFabric;

struct FabricOptions {
  std::string provider;              // as libfabric names it: efa, cxi, tcp, shm, verbs;ofi_rxm
  std::vector<std::string> devices;  // NICs of this rank, among which chunks alternate; empty: the provider's first
  std::string host;                  // numeric address of the NIC, for providers over IP; empty: the provider's choice
  bool has_remote_data = true;       // whether writes of this provider bring completion data to the receiver
  double timeout_s = 100;            // a peer that completes nothing for half of it is lost
  uintptr_t memory = 0;              // GPU memory for window and words; 0: pinned host memory
  int device = 0;                    // the GPU of `memory`
};

// Names of the provider's NICs, each once. An empty provider only loads the library. Throws LinkError where libfabric
// or the provider is not there.
std::vector<std::string> fabric_devices(const std::string& provider);

// Throws LinkError that names the provider and the device, and its error.
std::unique_ptr<Link> make_fabric_link(const LinkLayout& layout, const FabricOptions& options);

}  // namespace hybrid_ep
