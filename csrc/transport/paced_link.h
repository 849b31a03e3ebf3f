// A link with the rate of a NIC: a put leaves when the puts before it have crossed at this rate. Another link carries
// it out. Credits pass at once.
#pragma once

#include <memory>
#include <string>

#include "transport/link.h"

namespace hybrid_ep {

// The rate, for the description of a link; empty for 0.
std::string with_rate(double gbytes_per_s);

// gbytes_per_s: 10⁹ bytes a second, above 0.
std::unique_ptr<Link> make_paced_link(std::unique_ptr<Link> link, double gbytes_per_s);

}  // namespace hybrid_ep
