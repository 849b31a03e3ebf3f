// Commands from kernels to the proxy: FIFOs in pinned host memory, each with many writers and one reader.
//
//     head (GPU) ─ compare and swap ─► index ─► 16 bytes at index % kFifoSlots ─► proxy ─► done (host), seen by
//     writers
//
// A command has the parity of its lap, so the reader needs no tail: it checks whether the next entry has a command of
// the expected lap. Indices wrap at 2³², a multiple of kFifoSlots.
//
// The last free entries are for ends of calls: a call that has failed because the FIFO is full still ends, and the
// proxy may sleep once the link works again or has failed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/command.h"

namespace hybrid_ep {

constexpr uint32_t kFifoSlots = 1024;  // a power of two
constexpr uint32_t kEndSlots = 16;     // only for ends of calls
constexpr int kMaxFifos = 64;

// How many entries may be in use once a command of a kind is appended.
HYBRID_EP_HOST_DEVICE uint32_t slots_for(CommandKind kind) {
  return kind == CommandKind::kEnd ? kFifoSlots : kFifoSlots - kEndSlots;
}

// The phase of the command of an index. Memory is zero before the first, which has phase 1.
HYBRID_EP_HOST_DEVICE uint32_t phase_of_index(uint32_t index) { return (index / kFifoSlots & 1) ^ 1; }

// A counter that has a line for itself.
struct alignas(128) FifoCursor {
  uint32_t value;
};

// One rank's FIFOs, as kernels and the proxy see them.
struct FifoView {
  PackedCommand* commands;  // [num_fifos][kFifoSlots], pinned: release (or a fence, then relaxed), acquire
  FifoCursor* done;         // [num_fifos], pinned: commands that the proxy has read; release, acquire at system scope
  FifoCursor* heads;        // [num_fifos], GPU: indices taken; relaxed, compare and swap at GPU scope
  FifoCursor* known_done;   // [num_fifos], GPU: what a writer has last read of `done`; release, acquire at GPU scope
  int num_fifos;
};

// The proxy's end of one FIFO.
class FifoReader {
 public:
  FifoReader(const FifoView& view, int fifo)
      : commands_(view.commands + static_cast<size_t>(fifo) * kFifoSlots), done_(&view.done[fifo].value) {}

  // Looks at the next command without taking it; false: there is none. Acquires what its writer has released.
  bool peek(Command* command) const {
    const PackedCommand* slot = commands_ + next_ % kFifoSlots;
    PackedCommand packed;
    packed.head = __atomic_load_n(&slot->head, __ATOMIC_ACQUIRE);
    if (phase_of(packed.head) != phase_of_index(next_)) return false;
    packed.word_low = slot->word_low;
    packed.word_high = slot->word_high;
    packed.num_bytes = slot->num_bytes;
    *command = unpack(packed);
    return true;
  }
  void take() { ++next_; }
  // Returns credits to the writers: the slots of all commands taken may be written again.
  void publish() {
    if (published_ == next_) return;
    __atomic_store_n(done_, next_, __ATOMIC_RELEASE);
    published_ = next_;
  }
  uint32_t num_taken() const { return next_; }
  uint32_t num_unpublished() const { return next_ - published_; }

 private:
  const PackedCommand* commands_;
  uint32_t* done_;
  uint32_t next_ = 0, published_ = 0;
};

}  // namespace hybrid_ep
