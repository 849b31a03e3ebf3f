#include <nvshmem.h>
#include <nvshmemx.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "common/check.h"
#include "common/device_guard.h"
#include "kernels/launch.h"
#include "runtime/nvshmem/world.h"

namespace hybrid_ep {
namespace {

constexpr auto kPollPause = std::chrono::microseconds(100);

void check_nvshmem(int status, const char* call) {
  if (status != 0) throw NvshmemError(std::string(call) + " returned " + std::to_string(status));
}

struct QuietParams {};

__global__ void quiet_kernel(QuietParams) {
  if (threadIdx.x == 0) nvshmem_quiet();
}

// Ends with its scope.
struct OwnStream {
  OwnStream() { check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  ~OwnStream() { cudaStreamDestroy(stream); }  // also of work that goes on
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaStream_t stream = nullptr;
};

}  // namespace

std::string nvshmem_unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  check_nvshmem(nvshmemx_get_uniqueid(&id), "nvshmemx_get_uniqueid");
  return {reinterpret_cast<const char*>(&id), sizeof(id)};
}

void join_nvshmem(int rank, int num_ranks, const std::string& unique_id, int device) {
  nvshmemx_uniqueid_t id;
  require(unique_id.size() == sizeof(id), "bytes of a unique id", unique_id.size(), "those of nvshmem_unique_id");
  std::memcpy(&id, unique_id.data(), sizeof(id));
  // No DeviceGuard: NVSHMEM keeps to the device that is current here.
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  check_nvshmem(nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &id, &attributes), "nvshmemx_set_attr_uniqueid_args");
  // nvshmemx_init_attr would end the process where this returns an error.
  const nvshmemi_version_t version{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                   NVSHMEM_VENDOR_PATCH_VERSION};
  int provided = 0;
  check_nvshmem(
      nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID, &attributes, version),
      "nvshmemi_init_thread");
  if (nvshmem_my_pe() != rank || nvshmem_n_pes() != num_ranks) {
    throw NvshmemError("this process is PE " + std::to_string(nvshmem_my_pe()) + " of " +
                       std::to_string(nvshmem_n_pes()) + " in the world that it has joined; needed: PE " +
                       std::to_string(rank) + " of " + std::to_string(num_ranks));
  }
}

uint8_t* allocate_symmetric(size_t num_bytes, int device) {
  const DeviceGuard guard(device);
  auto* memory = static_cast<uint8_t*>(nvshmem_malloc(num_bytes));
  if (memory == nullptr) {
    throw NvshmemError("nvshmem_malloc gave no memory for " + std::to_string(num_bytes) +
                       " bytes; NVSHMEM_SYMMETRIC_SIZE is the size of its heap");
  }
  clear_symmetric(memory, num_bytes, device);
  return memory;
}

std::vector<uint8_t*> map_peers(uint8_t* memory, const std::vector<int>& pes) {
  std::vector<uint8_t*> mapped;
  for (const int pe : pes) mapped.push_back(static_cast<uint8_t*>(nvshmem_ptr(memory, pe)));
  return mapped;
}

void clear_symmetric(uint8_t* memory, size_t num_bytes, int device) {
  const DeviceGuard guard(device);
  const OwnStream own;
  check_cuda(cudaMemsetAsync(memory, 0, num_bytes, own.stream), "cudaMemsetAsync");
  check_cuda(cudaStreamSynchronize(own.stream), "cudaStreamSynchronize");
}

bool quiet_nvshmem(int device, double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  const DeviceGuard guard(device);
  const OwnStream own;
  launch_kernel(LaunchKind::kPlain, quiet_kernel, QuietParams{}, dim3(1), 32, 0, own.stream);
  while (true) {
    const cudaError_t status = cudaStreamQuery(own.stream);
    if (status == cudaSuccess) return true;
    if (status != cudaErrorNotReady) check_cuda(status, "cudaStreamQuery");
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kPollPause);
  }
}

}  // namespace hybrid_ep
