// A host thread that gives commands and reads words as a kernel does. Windows are in host memory. For measuring a link
// alone. It must be the only writer of its FIFO.
#pragma once

#include <cstddef>

#include "transport/link_view.h"

namespace hybrid_ep {

class HostWriter {
 public:
  HostWriter(const LinkView& view, int fifo) : view_(view), fifo_(fifo) {}

  // Appends a command; publishes what the thread has written before. False: the FIFO has no entry for it.
  bool push(const Command& command) {
    const uint32_t done = __atomic_load_n(&view_.fifos.done[fifo_].value, __ATOMIC_ACQUIRE);
    if (next_ - done >= slots_for(command.kind)) return false;
    PackedCommand* slot = view_.fifos.commands + static_cast<size_t>(fifo_) * kFifoSlots + next_ % kFifoSlots;
    const PackedCommand packed = pack(command, phase_of_index(next_));
    slot->word_low = packed.word_low;
    slot->word_high = packed.word_high;
    slot->num_bytes = packed.num_bytes;
    __atomic_store_n(&slot->head, packed.head, __ATOMIC_RELEASE);
    ++next_;
    return true;
  }

  uint64_t poll(int ring, int peer, int slot) const {
    return load(view_.layout.flag_idx(view_.layout.domain_idx, ring, peer, slot));
  }
  uint64_t poll_credit(int ring, int peer, int group) const {
    return load(view_.layout.credit_idx(view_.layout.domain_idx, ring, peer, group));
  }
  uint8_t* send_slot(int ring, int peer, int slot) const {
    return view_.window + view_.layout.send_offset(view_.layout.domain_idx, ring, peer, slot);
  }
  const uint8_t* recv_slot(int ring, int peer, int slot) const {
    return view_.window + view_.layout.recv_offset(view_.layout.domain_idx, ring, peer, slot);
  }
  uint32_t num_pushed() const { return next_; }
  uint32_t num_done() const { return __atomic_load_n(&view_.fifos.done[fifo_].value, __ATOMIC_ACQUIRE); }
  const LinkView& view() const { return view_; }

 private:
  uint64_t load(uint32_t idx) const { return __atomic_load_n(view_.words + idx, __ATOMIC_ACQUIRE); }

  const LinkView view_;
  const int fifo_;
  uint32_t next_ = 0;
};

}  // namespace hybrid_ep
