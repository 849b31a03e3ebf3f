// The part of DLPack's C ABI (version 0.x, capsule name "dltensor") that a producer needs.
#pragma once

#include <cstdint>

namespace hybrid_ep::bindings::dlpack {

constexpr int32_t kCuda = 2;

struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t num_dims;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // nullptr: contiguous
  uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};

}  // namespace hybrid_ep::bindings::dlpack
