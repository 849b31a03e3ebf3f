// The device side of a link between domains over NCCL's device API for networks (GIN): a spike, compiled and not
// shipped. docs/reasons.md says what is missing. Verbs and order are those of ProxyLink
// (csrc/transport/link.cuh).
//
//     put_signal   put of the chunk, whose completion adds to the flag: the flag then stands behind its chunk
//     poll         load of the own flag
//     credit       put of the word to the peer
//     poll_credit  load of the own word
//
// A flag holds a value, and GIN only adds. The sender keeps what it has last written to each flag, and adds the
// difference. A slot has one sender at a time, so that nobody else changes the flag meanwhile.
#pragma once

#include <nccl_device.h>

#include "transport/link_view.h"

namespace hybrid_ep {

// What a kernel needs beside LinkView; written by the host before the launch.
struct GinState {
  ncclDevComm comm;
  ncclWindow_t window, words;  // of the rings and of flags and credits, registered alike at all ranks
  uint64_t* last_flags;        // [num_words] of this rank: what it has last written to each peer's flag
};
__device__ __constant__ GinState gin_state;

class GinLink {
 public:
  static constexpr int kMostDomains = kMaxDomains;

  __device__ GinLink(const LinkView& view, int writer)
      : view_(view), gin_(gin_state.comm, writer % static_cast<int>(gin_state.comm.ginContextCount)) {}

  __device__ uint8_t* send_slot(int ring, int peer, int slot) const {
    return view_.window + view_.layout.send_offset(view_.layout.domain_idx, ring, peer, slot);
  }
  __device__ const uint8_t* recv_slot(int ring, int peer, int slot) const {
    return view_.window + view_.layout.recv_offset(view_.layout.domain_idx, ring, peer, slot);
  }

  // NOTE: a full queue is waited for inside NCCL, without our deadline: give_up is not asked.
  template <typename GiveUp>
  __device__ bool put_signal(int ring, int peer, int slot, uint32_t num_bytes, uint64_t word, GiveUp&&) const {
    const LinkLayout& layout = view_.layout;
    const int me = layout.domain_idx;
    const size_t flag = layout.flag_idx(peer, ring, me, slot);
    uint64_t& last = gin_state.last_flags[layout.flag_idx(me, ring, peer, slot)];
    const ncclGin_WeakVASignalAdd arrival{gin_state.words, sizeof(uint64_t) * flag, word - last};
    last = word;
    const ncclTeam team = ncclTeamRail(gin_state.comm);
    if (num_bytes == 0) {
      gin_.signal(team, peer, arrival, ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread,
                  cuda::thread_scope_system);
    } else {
      gin_.put(team, peer, gin_state.window, layout.recv_offset(peer, ring, me, slot), gin_state.window,
               layout.send_offset(me, ring, peer, slot), num_bytes, arrival, ncclGin_None{}, ncclCoopThread{},
               ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
    }
    return true;
  }

  __device__ uint64_t poll(int ring, int peer, int slot) const {
    return load(view_.layout.flag_idx(view_.layout.domain_idx, ring, peer, slot));
  }

  template <typename GiveUp>
  __device__ bool credit(int ring, int peer, int group, uint64_t word, GiveUp&&) const {
    const size_t idx = view_.layout.credit_idx(peer, ring, view_.layout.domain_idx, group);
    gin_.putValue(ncclTeamRail(gin_state.comm), peer, gin_state.words, sizeof(uint64_t) * idx, word, ncclGin_None{},
                  ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
    return true;
  }

  __device__ uint64_t poll_credit(int ring, int peer, int group) const {
    return load(view_.layout.credit_idx(view_.layout.domain_idx, ring, peer, group));
  }

  // Nobody sleeps between calls.
  template <typename GiveUp>
  __device__ bool end_call(GiveUp&&) const {
    return true;
  }

  // NCCL does not say which peer is lost.
  __device__ uint32_t failure() const {
    return *static_cast<volatile uint32_t*>(gin_state.comm.abortFlag) != 0 ? failure_word(-1) : 0;
  }

 private:
  __device__ uint64_t load(uint32_t idx) const { return gin_.readSignal(gin_state.words, sizeof(uint64_t) * idx); }

  const LinkView& view_;
  const ncclGin gin_;
};

}  // namespace hybrid_ep
