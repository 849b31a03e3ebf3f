// Tensors over the results of a low-latency dispatch.
#pragma once

#include "bindings/cuda/bindings.h"
#include "runtime/low_latency.h"

namespace hybrid_ep::bindings {

// The rows that each local expert has received, [LE] int32, of a dispatch whose results are at `address`. The tensor
// keeps `memory`.
pybind11::object make_counts(const LowLatencyPlan& plan, const pybind11::object& memory, uintptr_t address, int device);
// src_info and layout_range, likewise.
pybind11::tuple make_tables(const LowLatencyPlan& plan, const pybind11::object& memory, uintptr_t address, int device);

}  // namespace hybrid_ep::bindings
