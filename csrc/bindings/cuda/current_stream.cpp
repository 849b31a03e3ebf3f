#include "bindings/cuda/current_stream.h"

#include <utility>

#include "bindings/cuda/bindings.h"
#include "bindings/exchange_api.h"

namespace hybrid_ep::bindings {

CurrentStream::CurrentStream(int device, pybind11::object by_python)
    : device_(device), by_python_(std::move(by_python)) {}

cudaStream_t CurrentStream::get() const {
  const dlpack::ExchangeApi* api = exchange_api();
  if (api == nullptr) return stream_of(by_python_(device_).cast<uintptr_t>());
  void* stream = nullptr;
  if (api->current_stream(dlpack::kCuda, device_, &stream) != 0) throw pybind11::error_already_set();
  return static_cast<cudaStream_t>(stream);
}

}  // namespace hybrid_ep::bindings
