// The links that a module's kernels are compiled for: in `_cuda` the proxy's and that of mapped windows, in `_nvshmem`
// NVSHMEM's.
#pragma once

#ifdef HYBRID_EP_NVSHMEM
#include "transport/nvshmem_link.cuh"
#else
#include "transport/link.cuh"
#endif

namespace hybrid_ep {

template <typename Link>
struct LinkType {
  using type = Link;
};

// Calls `use` with the LinkType of each link.
template <typename Use>
void for_each_link(Use&& use) {
#ifdef HYBRID_EP_NVSHMEM
  use(LinkType<NvshmemLink>{});
#else
  use(LinkType<ProxyLink>{});
  use(LinkType<MappedLink>{});
#endif
}

// Returns what `kernel_of` returns for the LinkType of a view's link.
template <typename KernelOf>
auto kernel_for([[maybe_unused]] const LinkView& view, KernelOf&& kernel_of) {
#ifdef HYBRID_EP_NVSHMEM
  return kernel_of(LinkType<NvshmemLink>{});
#else
  return view.is_mapped ? kernel_of(LinkType<MappedLink>{}) : kernel_of(LinkType<ProxyLink>{});
#endif
}

}  // namespace hybrid_ep
