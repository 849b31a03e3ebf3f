// The parts of DLPack's C ABI, of version 1.3, that are used here.
#pragma once

#include <cstdint>

namespace hybrid_ep::dlpack {

constexpr int32_t kCpu = 1, kCuda = 2;

struct Device {
  int32_t type, id;
};
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kFloat8E4M3Fn = 10;
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
constexpr uint32_t kMajorVersion = 1, kMinorVersion = 3;
struct Version {
  uint32_t major, minor;
};
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned* self);
  uint64_t flags;
  Tensor tensor;
};

// What a tensor type offers as `__dlpack_c_exchange_api__`, a capsule.
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* managed_tensor_of;
  // Makes a tensor, which owns `managed` in any case. Returns 0, or −1 with a Python error.
  int (*object_of)(ManagedTensorVersioned* managed, void** object);
  // Describes a tensor without owning it. Returns 0, or −1 with a Python error; nullptr: it cannot be asked.
  int (*describe)(void* object, Tensor* tensor);
};

}  // namespace hybrid_ep::dlpack
