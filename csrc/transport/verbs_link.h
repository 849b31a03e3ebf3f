// The transport for RDMA NICs: reliable connections over libibverbs. A put is two writes on one queue pair, the chunk
// and then its flag. The flag becomes visible after the chunk, because flags lie in a memory region without relaxed
// ordering. On a network that keeps no order both are writes with immediate (arrivals.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/link.h"

namespace hybrid_ep {

// Whether the transport was compiled; otherwise (verbs_absent.cpp) the functions here throw LinkError.
extern const bool kHasVerbs;

struct VerbsOptions {
  std::vector<std::string> devices;  // NICs of this rank, as libibverbs names them
  int port = 1;
  int gid_index = -1;            // −1: RoCE v2 first, IPv4-mapped first among them
  int pkey_index = -1;           // −1: the first partition key with full membership that the peer has, too
  int service_level = 0;         // 0 to 15
  int traffic_class = 0;         // 0 to 255
  int mtu_bytes = 0;             // 0: what both ports have
  int num_queue_pairs = 2;       // per peer and NIC, 1 to 4
  bool relaxed_ordering = true;  // of chunks; flags never are
  bool unordered = false;        // the network keeps no order: write with immediate
  double timeout_s = 100;        // a peer that is silent for half of it is lost
  uintptr_t memory = 0;          // GPU memory for window and words; 0: pinned host memory
  bool window_only = false;  // `memory` is the window alone and must be registered; words are pinned, read by the host
};

// Names of the InfiniBand and RoCE NICs whose port is active; none where the kernel has no RDMA. Throws LinkError where
// libibverbs is not there.
std::vector<std::string> active_verbs_devices(int port);

// A queue pair's retries, chosen so that a lost peer is reported within half of timeout_s.
struct VerbsRetries {
  int timeout;  // 4.096 µs × 2^timeout until a retry
  int retries;
};
VerbsRetries retries_of(double timeout_s);

// Throws LinkError that names the device, and its error.
std::unique_ptr<Link> make_verbs_link(const LinkLayout& layout, const VerbsOptions& options);

}  // namespace hybrid_ep
