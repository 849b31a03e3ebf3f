// What torch offers to C in place of its Python calls: DLPack's exchange API, since torch 2.10.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include "bindings/dlpack_abi.h"

namespace hybrid_ep {

inline const dlpack::ExchangeApi* find_exchange_api() {
  namespace py = pybind11;
  const py::object tensor_type = py::module_::import("torch").attr("Tensor");
  if (!py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return nullptr;
  const py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeCapsule)) return nullptr;
  const auto* api =
      static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsule));
  return api->version.major == dlpack::kMajorVersion ? api : nullptr;
}

// nullptr: torch is older, or its API is of another major version. It is looked up once. A static variable alone could
// lock up: one thread imports without the GIL, and another one, which has it, waits for the first.
inline const dlpack::ExchangeApi* exchange_api() {
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<const dlpack::ExchangeApi*> found;
  return found.call_once_and_store_result(&find_exchange_api).get_stored();
}

}  // namespace hybrid_ep
