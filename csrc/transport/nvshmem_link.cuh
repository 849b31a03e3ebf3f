// The link whose kernels give their puts to NVSHMEM. Windows lie on NVSHMEM's symmetric heap: a put names a peer's slot
// by the address of the same slot in this rank's window, and by the peer's PE.
//
// If a peer's window is mapped, a chunk is built in its receive slot, as by MappedLink. NVSHMEM's own put to such a
// peer is a copy by the threads that call it, so one thread would copy whole chunks.
//
// To the other peers NVSHMEM writes a flag only when its chunk has arrived. Puts return before they are complete: the
// credit of a group says that its send slots have been read. Flags and credits are polled by the callers, up to their
// deadline: NVSHMEM's own waits have none. A put waits in NVSHMEM while the send queue of the NIC is full, however long
// that is.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "transport/link.cuh"

namespace hybrid_ep {

class NvshmemLink : public MappedLink {
 public:
  using MappedLink::MappedLink;
  static constexpr int kMostDomains = kMaxDomains;

  __device__ uint8_t* send_slot(int ring, int peer, int slot) const {
    if (is_mapped(peer)) return MappedLink::send_slot(ring, peer, slot);
    return view_.window + view_.layout.send_offset(view_.layout.domain_idx, ring, peer, slot);
  }
  template <typename GiveUp>
  __device__ bool put_signal(int ring, int peer, int slot, uint32_t num_bytes, uint64_t word, GiveUp&& give_up) const {
    if (is_mapped(peer)) return MappedLink::put_signal(ring, peer, slot, num_bytes, word, give_up);
    ptx::fence_acq_rel_system();
    uint64_t* flag = view_.words + view_.layout.flag_idx(peer, ring, view_.layout.domain_idx, slot);
    if (num_bytes == 0) return set(flag, peer, word);
    nvshmem_putmem_signal_nbi(view_.window + view_.layout.recv_offset(peer, ring, view_.layout.domain_idx, slot),
                              send_slot(ring, peer, slot), num_bytes, flag, word, NVSHMEM_SIGNAL_SET, view_.pes[peer]);
    return true;
  }
  template <typename GiveUp>
  __device__ bool credit(int ring, int peer, int group, uint64_t word, GiveUp&& give_up) const {
    if (is_mapped(peer)) return MappedLink::credit(ring, peer, group, word, give_up);
    ptx::fence_acq_rel_system();
    return set(view_.words + view_.layout.credit_idx(peer, ring, view_.layout.domain_idx, group), peer, word);
  }

 private:
  __device__ bool is_mapped(int peer) const { return view_.windows[peer] != nullptr; }
  __device__ bool set(uint64_t* address, int peer, uint64_t word) const {
    nvshmemx_signal_op(address, word, NVSHMEM_SIGNAL_SET, view_.pes[peer]);
    return true;
  }
};

}  // namespace hybrid_ep
