// Tensors over device memory that torch did not allocate: capsules in the form of DLPack, which torch makes tensors of.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace hybrid_ep {

// The type of an element, as DLPack names it.
struct ElementType {
  uint8_t code, bits;
};
constexpr uint8_t kInt = 0, kFloat = 2;  // codes

// Contiguous memory. `release` runs with the GIL when the last view of the tensor dies, and is destroyed then; at the
// interpreter's end it does not run.
pybind11::capsule make_capsule(uintptr_t address, std::vector<int64_t> shape, ElementType type, int device,
                               std::function<void()> release);

}  // namespace hybrid_ep
