// Text from outside (files of /sys, NVML) as Python and terminals can take it.
#pragma once

#include <string>

namespace hybrid_ep::topology {

// The text with every byte that is not printable ASCII replaced by '?': no invalid UTF-8, no control characters.
inline std::string printable(std::string text) {
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return text;
}

}  // namespace hybrid_ep::topology
