// The device side of a link between domains: what kernels may ask of a network. Kernels take the link's type as a
// template argument and name no network library.
//
//     build chunk in send_slot ─ put_signal ─► peer's recv_slot, then its flag ─ poll ─► read chunk ─ credit ─►
//     poll_credit
//
// How slots, flags and credits are addressed, and the three rules for words, are in layout/link_layout.h. `peer` is
// always the domain index of a peer, never this rank's.
//
// Order. put_signal publishes what the calling thread has written, or has observed as written, at system scope: a warp
// waits for its bulk stores (ptx::bulk_wait_written) and syncs before one lane calls it. poll acquires: later loads of
// the calling thread see the chunk, and so does what it releases to. Before bulk loads from the chunk comes
// ptx::fence_global_for_bulk. credit orders the calling thread's reads, and those it has observed as done, before the
// sender's next write: bulk loads count as read once their barrier has completed. Only kernels of the GPU that owns the
// window may read it.
//
// Calls. Where a proxy carries the commands out, the host opens a call (Proxy::begin_call) before the kernel runs.
// Exactly one thread of the kernel ends it (end_call) after all its other commands, also when the call has failed. The
// proxy sleeps when no call is open.
#pragma once

#include "transport/fifo.cuh"
#include "transport/link_view.h"

namespace hybrid_ep {

// Flags and credits in this rank's own memory: the same for every link.
class LinkEnd {
 public:
  // Owned from its flag to credit. 128-byte aligned, as every slot.
  __device__ const uint8_t* recv_slot(int ring, int peer, int slot) const {
    return view_.window + view_.layout.recv_offset(view_.layout.domain_idx, ring, peer, slot);
  }

  // Returns the flag of a receive slot. Any thread.
  __device__ uint64_t poll(int ring, int peer, int slot) const {
    return ptx::load_acquire_system(view_.words + view_.layout.flag_idx(view_.layout.domain_idx, ring, peer, slot));
  }

  // Returns the credit of a group of send slots. Any thread. Later writes of the calling thread to the slots are
  // ordered after the peer's reads.
  __device__ uint64_t poll_credit(int ring, int peer, int group) const {
    return ptx::load_acquire_system(view_.words + view_.layout.credit_idx(view_.layout.domain_idx, ring, peer, group));
  }

 protected:
  __device__ explicit LinkEnd(const LinkView& view) : view_(view) {}

  const LinkView& view_;
};

// The link by proxy: commands through a FIFO to a thread of the host.
class ProxyLink : public LinkEnd {
 public:
  static constexpr int kMostDomains = kMaxDomains;

  // `writer` spreads the threads that give commands over the FIFOs, as the index of a CTA does.
  __device__ ProxyLink(const LinkView& view, int writer) : LinkEnd(view), fifo_(writer % view.fifos.num_fifos) {}

  // Owned from the credit of its group to put_signal.
  __device__ uint8_t* send_slot(int ring, int peer, int slot) const {
    return view_.window + view_.layout.send_offset(view_.layout.domain_idx, ring, peer, slot);
  }

  // Sends the first num_bytes of a send slot, then writes `word` to its flag at the peer; with 0 bytes the flag alone.
  // One thread. Returns false where the FIFO has been full until give_up() was true.
  template <typename GiveUp>
  __device__ bool put_signal(int ring, int peer, int slot, uint32_t num_bytes, uint64_t word, GiveUp&& give_up) const {
    return push({CommandKind::kPut, ring, peer, slot, num_bytes, word}, give_up);
  }

  // Publishes to the peer, by `word`, that slots [group, group + 1) × slots_per_credit have been read. One thread;
  // returns as put_signal does.
  template <typename GiveUp>
  __device__ bool credit(int ring, int peer, int group, uint64_t word, GiveUp&& give_up) const {
    return push({CommandKind::kCredit, ring, peer, group, 0, word}, give_up);
  }

  // Ends the call that the host has opened. One thread of the grid, after every other command of the call.
  template <typename GiveUp>
  __device__ bool end_call(GiveUp&& give_up) const {
    return push({CommandKind::kEnd, 0, 0, 0, 0, 1}, give_up);
  }

  // 0 while the transport works, else failure_word: waits of the call cannot succeed. This is a load from host memory,
  // so a wait calls it only now and then. Any thread.
  __device__ uint32_t failure() const { return ptx::load_acquire_system(view_.failure); }

 private:
  template <typename GiveUp>
  __device__ bool push(const Command& command, GiveUp&& give_up) const {
    ptx::fence_acq_rel_system();
    return push_command(view_.fifos, fifo_, command, give_up);
  }

  int fifo_;
};

// Waits until a chunk that takes this long has crossed, after all that came before it. One thread.
__device__ inline void wait_for_crossing(uint64_t* crossed_at, uint64_t duration_ns) {
  auto* word = reinterpret_cast<unsigned long long*>(crossed_at);
  atomicMax(word, static_cast<unsigned long long>(ptx::clock_ns()));
  const uint64_t end = atomicAdd(word, static_cast<unsigned long long>(duration_ns)) + duration_ns;
  while (ptx::clock_ns() < end) {
  }
}

// The link to peers whose windows are mapped: a chunk is built in the peer's receive slot, so that a put is its flag.
class MappedLink : public LinkEnd {
 public:
  static constexpr int kMostDomains = kMaxMappedDomains;

  __device__ MappedLink(const LinkView& view, int) : LinkEnd(view) {}

  __device__ uint8_t* send_slot(int ring, int peer, int slot) const {
    return view_.windows[peer] + view_.layout.recv_offset(peer, ring, view_.layout.domain_idx, slot);
  }
  template <typename GiveUp>
  __device__ bool put_signal(int ring, int peer, int slot, uint32_t num_bytes, uint64_t word, GiveUp&&) const {
    if (view_.ns_per_byte > 0) {
      wait_for_crossing(view_.crossed_at, static_cast<uint64_t>(static_cast<float>(num_bytes) * view_.ns_per_byte));
    }
    return write(peer, view_.layout.flag_idx(peer, ring, view_.layout.domain_idx, slot), word);
  }
  template <typename GiveUp>
  __device__ bool credit(int ring, int peer, int group, uint64_t word, GiveUp&&) const {
    return write(peer, view_.layout.credit_idx(peer, ring, view_.layout.domain_idx, group), word);
  }
  template <typename GiveUp>
  __device__ bool end_call(GiveUp&&) const {
    return true;
  }
  __device__ uint32_t failure() const { return 0; }

 private:
  __device__ bool write(int peer, uint32_t idx, uint64_t word) const {
    auto* words = reinterpret_cast<uint64_t*>(view_.windows[peer] + view_.layout.window_bytes);
    ptx::store_release_system(words + idx, word);
    return true;
  }
};

}  // namespace hybrid_ep
