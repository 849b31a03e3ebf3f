// The link whose puts the GPU gives to NVSHMEM itself. Windows lie on NVSHMEM's symmetric heap: a peer's slot has the
// address that it has in this rank's window, and goes with the peer's PE.
//
// NVSHMEM writes a flag only when its chunk has arrived. Puts return before they are complete: the credit of a group
// says that its send slots have been read. Flags and credits are polled by the callers, up to their deadline: NVSHMEM's
// own waits have none. A put waits in NVSHMEM while the send queue of the NIC is full, however long that is.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "transport/link.cuh"

namespace hybrid_ep {

class NvshmemLink : public LinkEnd {
 public:
  __device__ NvshmemLink(const LinkView& view, int) : LinkEnd(view) {}

  __device__ uint8_t* send_slot(int ring, int peer, int slot) const {
    return view_.window + view_.layout.send_offset(view_.layout.domain_idx, ring, peer, slot);
  }
  template <typename GiveUp>
  __device__ bool put_signal(int ring, int peer, int slot, uint32_t num_bytes, uint64_t word, GiveUp&&) const {
    ptx::fence_acq_rel_system();
    if (num_bytes == 0) return set(flag_of(ring, peer, slot), peer, word);
    nvshmem_putmem_signal_nbi(slot_of(ring, peer, slot), send_slot(ring, peer, slot), num_bytes,
                              flag_of(ring, peer, slot), word, NVSHMEM_SIGNAL_SET, view_.pes[peer]);
    return true;
  }
  // Where the peer's memory is mapped, all lanes copy.
  __device__ bool put_signal_by_warp(int ring, int peer, int slot, uint32_t num_bytes, uint64_t word) const {
    ptx::fence_acq_rel_system();
    if (num_bytes == 0) return threadIdx.x % 32 != 0 || set(flag_of(ring, peer, slot), peer, word);
    nvshmemx_putmem_signal_nbi_warp(slot_of(ring, peer, slot), send_slot(ring, peer, slot), num_bytes,
                                    flag_of(ring, peer, slot), word, NVSHMEM_SIGNAL_SET, view_.pes[peer]);
    return true;
  }
  template <typename GiveUp>
  __device__ bool credit(int ring, int peer, int group, uint64_t word, GiveUp&&) const {
    ptx::fence_acq_rel_system();
    return set(view_.words + view_.layout.credit_idx(peer, ring, view_.layout.domain_idx, group), peer, word);
  }
  template <typename GiveUp>
  __device__ bool end_call(GiveUp&&) const {
    return true;
  }
  // NVSHMEM tells a kernel of no failure.
  __device__ uint32_t failure() const { return 0; }

 private:
  __device__ uint8_t* slot_of(int ring, int peer, int slot) const {
    return view_.window + view_.layout.recv_offset(peer, ring, view_.layout.domain_idx, slot);
  }
  __device__ uint64_t* flag_of(int ring, int peer, int slot) const {
    return view_.words + view_.layout.flag_idx(peer, ring, view_.layout.domain_idx, slot);
  }
  __device__ bool set(uint64_t* address, int peer, uint64_t word) const {
    nvshmemx_signal_op(address, word, NVSHMEM_SIGNAL_SET, view_.pes[peer]);
    return true;
  }
};

template <typename GiveUp>
__device__ bool put_signal_by_warp(const NvshmemLink& link, int ring, int peer, int slot, uint32_t num_bytes,
                                   uint64_t word, GiveUp&&) {
  return link.put_signal_by_warp(ring, peer, slot, num_bytes, word);
}

}  // namespace hybrid_ep
