// What torch offers to C in place of its Python calls: DLPack's exchange API, since torch 2.10.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/dlpack_abi.h"

namespace hybrid_ep::bindings {

// nullptr: torch is older, or its API is of another major version.
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

}  // namespace hybrid_ep::bindings
