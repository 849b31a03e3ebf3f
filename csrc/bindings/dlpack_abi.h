// The parts of DLPack's C ABI that are used here. Capsules "dltensor" are of version 0.x, the exchange API is of 1.3.
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

// What a tensor type offers as `__dlpack_c_exchange_api__`, a capsule.
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";
constexpr uint32_t kExchangeMajorVersion = 1;
struct ExchangeApi {
  uint32_t major_version, minor_version;
  ExchangeApi* previous;
  void* allocate;
  void* managed_tensor_of;
  void* object_of;
  // Describes a tensor without owning it. Returns 0, or −1 with a Python error; nullptr: it cannot be asked.
  int (*describe)(void* object, Tensor* tensor);
  void* current_stream;
};

}  // namespace hybrid_ep::bindings::dlpack
