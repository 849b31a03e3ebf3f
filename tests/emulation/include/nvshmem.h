// What csrc/ uses of NVSHMEM, between processes of one machine: emulated_nvshmem.cpp. A put is carried out by a thread,
// some time later and in any order, and its flag is written after it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime.h"

constexpr int NVSHMEM_VENDOR_MAJOR_VERSION = 3, NVSHMEM_VENDOR_MINOR_VERSION = 4, NVSHMEM_VENDOR_PATCH_VERSION = 5;
constexpr int NVSHMEM_THREAD_SERIALIZED = 2, NVSHMEM_SIGNAL_SET = 9;
constexpr unsigned NVSHMEMX_INIT_WITH_UNIQUEID = 1 << 3;

struct nvshmemx_uniqueid_t {
  char name[128];
};
struct nvshmemi_version_t {
  int major, minor, patch;
};
struct nvshmemx_init_attr_t {
  int rank, num_ranks;
  nvshmemx_uniqueid_t id;
};
#define NVSHMEMX_UNIQUEID_INITIALIZER \
  {                                   \
  }
#define NVSHMEMX_INIT_ATTR_INITIALIZER \
  {                                    \
  }

int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id);
int nvshmemx_set_attr_uniqueid_args(int rank, int num_ranks, const nvshmemx_uniqueid_t* id,
                                    nvshmemx_init_attr_t* attributes);
int nvshmemi_init_thread(int requested, int* provided, unsigned flags, nvshmemx_init_attr_t* attributes,
                         nvshmemi_version_t version);
int nvshmem_my_pe();
int nvshmem_n_pes();
void* nvshmem_malloc(size_t num_bytes);
void nvshmem_putmem_signal_nbi(void* to, const void* from, size_t num_bytes, uint64_t* flag, uint64_t word, int op,
                               int pe);
void* nvshmem_ptr(const void* address, int pe);
void nvshmemx_signal_op(uint64_t* flag, uint64_t word, int op, int pe);
void nvshmem_quiet();
