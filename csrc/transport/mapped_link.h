// Domains that are parts of one host, on GPUs: each rank maps its peers' windows, and kernels write them over NVLink
// (MappedLink in link.cuh). The proxy has nothing to do.
//
// NOTE: the host cannot carry chunks between GPUs here. A copy waits in the driver while another thread of the process
// is in cudaFree, which waits for the kernel, which waits for the copy.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/link.h"

namespace hybrid_ep {

// `windows` are those of all domains by index, as this process maps them, each with its words behind it.
std::unique_ptr<Link> make_mapped_link(const LinkLayout& layout, const std::vector<uintptr_t>& windows);

}  // namespace hybrid_ep
