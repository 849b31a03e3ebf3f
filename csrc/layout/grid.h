// A rank in the grid of domains × ranks of a domain: rank = domain_idx × ranks_per_domain + domain_rank.
#pragma once

#include "common/host_device.h"

namespace hybrid_ep {

struct Grid {
  int rank, num_domains, ranks_per_domain;

  HYBRID_EP_HOST_DEVICE int num_ranks() const { return num_domains * ranks_per_domain; }
  HYBRID_EP_HOST_DEVICE int domain_idx() const { return rank / ranks_per_domain; }
  HYBRID_EP_HOST_DEVICE int domain_rank() const { return rank % ranks_per_domain; }
  // The rank with this rank's domain rank in a domain.
  HYBRID_EP_HOST_DEVICE int peer_in(int domain) const { return domain * ranks_per_domain + domain_rank(); }
};

}  // namespace hybrid_ep
