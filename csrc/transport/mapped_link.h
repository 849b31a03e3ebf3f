// Links whose kernels write their peers' windows themselves, so that the proxy has nothing to do.
//
// - Domains that are parts of one host, on GPUs: each rank maps its peers' windows, and kernels write them over NVLink
//   (MappedLink in link.cuh).
// - NVSHMEM: the windows lie on its symmetric heap. Kernels write the windows that are mapped, and give NVSHMEM their
//   puts to the others (NvshmemLink in nvshmem_link.cuh).
//
// NOTE: the host cannot carry chunks between GPUs of one host. A copy waits in the driver while another thread of the
// process is in cudaFree, which waits for the kernel, which waits for the copy.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/link.h"

namespace hybrid_ep {

// `windows` are those of all domains by index, as this process maps them, each with its words behind it. gbytes_per_s:
// the rate of a NIC, to which kernels keep; 0: no limit.
std::unique_ptr<Link> make_mapped_link(const LinkLayout& layout, const std::vector<uintptr_t>& windows,
                                       double gbytes_per_s);

// `windows` are those of all domains by index on the symmetric heap, as this process maps them, each with its words
// behind it; 0: it is not mapped. `pes` are those of all domains.
std::unique_ptr<Link> make_nvshmem_link(const LinkLayout& layout, const std::vector<uintptr_t>& windows,
                                        const std::vector<int>& pes);

}  // namespace hybrid_ep
