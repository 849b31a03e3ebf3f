// What csrc/ uses of the CUDA runtime and of CUDA C++, on the CPU: emulator.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>

#include "emulator.h"

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(n) alignas(n)
#define __forceinline__ inline
#define __noinline__  // of which libstdc++ makes attributes

// Where the running thread is. Objects and not macros, for a launch has members of these names.
struct Coordinate {
  unsigned (*get)();
  operator unsigned() const { return get(); }
};
struct Position {
  Coordinate x, y;
};
inline const Position threadIdx{[] { return emulated::thread_index().x; }, [] { return emulated::thread_index().y; }};
inline const Position blockIdx{[] { return emulated::block_index().x; }, [] { return emulated::block_index().y; }};
inline const Position blockDim{[] { return emulated::block_size().x; }, [] { return emulated::block_size().y; }};
inline const Position gridDim{[] { return emulated::grid_size().x; }, [] { return emulated::grid_size().y; }};

// Vectors.
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// Arithmetic. The host rounds to nearest even, as these do.
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
inline float __uint_as_float(unsigned bits) { return emulated::from_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(emulated::as_bits(value)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;  // or the sum after it would be fused with it
  return product;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
template <typename T>
T __ldcg(const T* address) {
  return *const_cast<const volatile T*>(address);
}

// Collectives of a warp; csrc/ has none of fewer than all lanes.
inline void __syncwarp(unsigned = 0xffffffffu) { emulated::exchange(0); }
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated::from_bits<T>(emulated::exchange(emulated::as_bits(value))[lane & 31]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = static_cast<int>(threadIdx.x % 32) ^ mask;
  return emulated::from_bits<T>(emulated::exchange(emulated::as_bits(value))[lane]);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const uint64_t* values = emulated::exchange(value);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(values[i]) << i;
  return result;
}
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == 0xffffffffu; }
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  const uint64_t mine = emulated::as_bits(value), *values = emulated::exchange(mine);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(values[i] == mine) << i;
  return result;
}
template <typename T, typename Choose>
T reduce(T value, Choose choose) {
  const uint64_t* values = emulated::exchange(emulated::as_bits(value));
  T result = emulated::from_bits<T>(values[0]);
  for (int i = 1; i < 32; ++i) result = choose(result, emulated::from_bits<T>(values[i]));
  return result;
}
template <typename T>
T __reduce_add_sync(unsigned, T value) {
  return reduce(value, std::plus<T>());
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  return reduce(value, max<T, T>);
}
template <typename T>
T __reduce_min_sync(unsigned, T value) {
  return reduce(value, min<T, T>);
}

// Collectives of a CTA.
inline void __syncthreads() { emulated::count_in_block(false); }
inline int __syncthreads_and(int value) { return emulated::count_in_block(value == 0) == 0; }
inline int __syncthreads_or(int value) { return emulated::count_in_block(value != 0) > 0; }

// Atomics, all of them of the whole system.
template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
template <typename T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
template <typename T>
T atomicCAS_system(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return atomicCAS(address, expected, value);
}
template <typename T>
T atomicOr_system(T* address, std::common_type_t<T> bits) {
  return __atomic_fetch_or(address, bits, __ATOMIC_ACQ_REL);
}
template <typename T>
T atomicMax(T* address, std::common_type_t<T> value) {
  T seen = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  for (T before; seen < value && (before = atomicCAS(address, seen, value)) != seen;) seen = before;
  return seen;
}
template <typename T>
T atomicMin(T* address, std::common_type_t<T> value) {
  T seen = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  for (T before; value < seen && (before = atomicCAS(address, seen, value)) != seen;) seen = before;
  return seen;
}

// The runtime.
using cudaError_t = int;
using cudaStream_t = void*;
struct EmulatedEvent {
  void* recorded_on;
};
using cudaEvent_t = EmulatedEvent*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorNotReady = 600, cudaErrorLaunchFailure = 719;
inline const char* cudaGetErrorName(cudaError_t) { return "an error"; }
inline const char* cudaGetErrorString(cudaError_t) { return "of the emulation"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : emulated::num_sms();
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
constexpr int cudaSharedmemCarveoutMaxShared = 100;
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
struct cudaFuncAttributes {};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}
constexpr unsigned cudaHostAllocMapped = 0, cudaHostAllocPortable = 0, cudaEventDisableTiming = 0;
inline cudaError_t cudaHostAlloc(void** memory, size_t num_bytes, unsigned) {
  *memory = std::calloc(1, num_bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) {
  return emulated::stream_is_busy && emulated::stream_is_busy() ? cudaErrorNotReady : cudaSuccess;
}
constexpr unsigned cudaStreamNonBlocking = 1;
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t num_bytes, cudaStream_t) {
  std::memset(memory, value, num_bytes);
  return cudaSuccess;
}
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool is_captured = emulated::capture_of && emulated::capture_of(stream) != 0;
  *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*function)(void*), void* data) {
  function(data);
  return cudaSuccess;
}
#define CUDART_VERSION 13000
using cudaGraph_t = void*;
using cudaUserObject_t = void*;
constexpr unsigned cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1;
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t*) {
  *id = emulated::capture_of ? emulated::capture_of(stream) : 0;
  return cudaStreamIsCapturing(stream, status);
}
inline cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, void (*)(void*), unsigned, unsigned) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new EmulatedEvent{};
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->recorded_on = stream;
  ++emulated::num_records;
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ++emulated::num_waits;
  if (emulated::on_wait) emulated::on_wait(stream, event->recorded_on);
  return cudaSuccess;
}

struct dim3 : emulated::Index {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : Index{x, y, z} {}
};
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative, cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative, programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};
template <typename Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params),
                               const std::remove_const_t<Params>& params) {
  if (std::getenv("HYBRID_EP_EMULATION_REFUSES") != nullptr) return cudaErrorLaunchFailure;
  bool is_cooperative = false;
  for (int i = 0; i < config->numAttrs; ++i) {
    is_cooperative |= config->attrs[i].id == cudaLaunchAttributeCooperative;
  }
  const emulated::Grid grid{config->gridDim, config->blockDim, static_cast<int>(config->dynamicSmemBytes),
                            is_cooperative};
  emulated::launch(grid, [&] { kernel(params); });
  return cudaSuccess;
}
