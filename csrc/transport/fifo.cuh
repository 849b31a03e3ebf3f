// The kernels' end of a FIFO (fifo.h).
#pragma once

#include "device/ptx/memory.cuh"
#include "transport/fifo.h"

namespace hybrid_ep {

// Appends a command; any thread of any CTA. If the FIFO has no entry for it, calls `give_up()` between looks, and
// returns false once that is true: nothing is written then, and the FIFO stays usable.
//
// The command is stored relaxed. Before the call, fence the data that the command refers to
// (ptx::fence_acq_rel_system).
template <typename GiveUp>
__device__ bool push_command(const FifoView& fifos, int fifo, const Command& command, GiveUp&& give_up) {
  uint32_t* head = &fifos.heads[fifo].value;
  uint32_t* known_done = &fifos.known_done[fifo].value;
  const uint32_t num_slots = slots_for(command.kind);
  uint32_t index = ptx::load_relaxed_gpu(head);
  while (true) {
    if (index - ptx::load_acquire_gpu(known_done) >= num_slots) {
      // A load over PCIe, once in a lap where the proxy keeps up.
      const uint32_t done = ptx::load_acquire_system(&fifos.done[fifo].value);
      ptx::store_release_gpu(known_done, done);
      if (index - done >= num_slots) {
        if (give_up()) return false;
        index = ptx::load_relaxed_gpu(head);
        continue;
      }
    }
    const uint32_t before = atomicCAS(head, index, index + 1);
    if (before == index) break;
    index = before;
  }
  const PackedCommand packed = pack(command, phase_of_index(index));
  PackedCommand* slot = fifos.commands + static_cast<int64_t>(fifo) * kFifoSlots + index % kFifoSlots;
  ptx::store_relaxed_system(reinterpret_cast<uint4*>(slot),
                            make_uint4(packed.word_low, packed.word_high, packed.num_bytes, packed.head));
  return true;
}

}  // namespace hybrid_ep
