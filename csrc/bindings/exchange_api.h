// What torch offers to C in place of its Python calls: DLPack's exchange API, since torch 2.10.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include "bindings/dlpack_abi.h"

namespace hybrid_ep {

inline const dlpack::ExchangeApi* find_exchange_api() {
  namespace py = pybind11;
  const py::object tensor_type = py::module_::import("torch").attr("Tensor");
  const py::object capsule = py::getattr(tensor_type, "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeCapsule)) {
    const auto* api =
        static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsule));
    if (api->version.major == dlpack::kMajorVersion) return api;
  }
  throw py::import_error("torch has no exchange API of DLPack 1; allowed: torch 2.10 or later");
}

// It is looked up once. A static variable alone could lock up: one thread imports without the GIL, and another one,
// which has it, waits for the first.
inline const dlpack::ExchangeApi& exchange_api() {
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<const dlpack::ExchangeApi*> found;
  return *found.call_once_and_store_result(&find_exchange_api).get_stored();
}

}  // namespace hybrid_ep
