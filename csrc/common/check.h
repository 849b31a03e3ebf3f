// Checks of arguments that come from Python. A failed check throws std::invalid_argument, which pybind11 turns into
// ValueError; the Python layer checks first and raises ConfigError, so what reaches here is an internal mistake.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace hybrid_ep {

template <typename Value>
void require(bool ok, const char* what, const Value& value, const char* allowed) {
  if (ok) return;
  std::ostringstream message;
  message << what << " is " << value << "; allowed: " << allowed;
  throw std::invalid_argument(message.str());
}

}  // namespace hybrid_ep
