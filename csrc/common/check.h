// Checks of arguments that come from Python. `require` throws std::invalid_argument, which pybind11 turns into
// ValueError: the Python layer checks first, so what reaches it is an internal mistake.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace hybrid_ep {

// An argument of a caller does not fit: ConfigError of Python.
class ConfigError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename Value>
void require(bool ok, const char* what, const Value& value, const char* allowed) {
  if (ok) return;
  std::ostringstream message;
  message << what << " is " << value << "; allowed: " << allowed;
  throw std::invalid_argument(message.str());
}

}  // namespace hybrid_ep
