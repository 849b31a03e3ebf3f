// A link with a faulty network, for tests: it delays, reorders and loses commands at random, from a seed. Another link
// carries out the rest.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/link.h"

namespace hybrid_ep {

struct Faults {
  uint64_t seed = 0;
  int max_delay_us = 0;      // each command waits for a time of its own, up to this
  double lost_fraction = 0;  // of puts that never arrive, without a report
};

std::unique_ptr<Link> make_faulty_link(std::unique_ptr<Link> link, const Faults& faults);

}  // namespace hybrid_ep
