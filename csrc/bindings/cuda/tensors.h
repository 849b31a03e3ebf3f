// Tensors over device memory that torch did not allocate.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/plan.h"

namespace hybrid_ep::bindings {

// Contiguous memory. `release` runs with the GIL when the last view of the tensor dies, and is destroyed then; at the
// interpreter's end it does not run.
pybind11::object make_tensor(uintptr_t address, std::vector<int64_t> shape, ElementType type, int device,
                             std::function<void()> release);

}  // namespace hybrid_ep::bindings
