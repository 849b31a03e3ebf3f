// Arrivals over a network that keeps no order. A put is two writes with immediate: the chunk, and its word into staging
// memory. Each immediate notifies the receiver's CPU that its write has arrived. After both, the CPU writes the word to
// the flag. Words without a chunk come alone.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/link_layout.h"
#include "transport/command.h"

namespace hybrid_ep {

enum class Part : uint32_t { kChunk = 0, kWordOfChunk = 1, kWordAlone = 2, kCredit = 3 };

// The immediate of a write.
struct Immediate {
  Part part;
  int ring, slot;

  uint32_t pack() const {
    return (static_cast<uint32_t>(slot) << kRingBits | static_cast<uint32_t>(ring)) << 2 | static_cast<uint32_t>(part);
  }
  static Immediate unpack(uint32_t bits) {
    return {static_cast<Part>(bits & 3), static_cast<int>(bits >> 2 & ((1u << kRingBits) - 1)),
            static_cast<int>(bits >> (2 + kRingBits))};
  }
};

class Arrivals {
 public:
  explicit Arrivals(const LinkLayout& layout) : layout_(layout), half_(layout.num_words) {}

  // Takes the immediate of a write from a peer. Returns the index of the word that is complete now, −1 while its other
  // half is missing, or −2 if no write has such an immediate.
  int64_t take(int peer, Immediate immediate) {
    const bool is_credit = immediate.part == Part::kCredit;
    const Command command{
        is_credit ? CommandKind::kCredit : CommandKind::kPut, immediate.ring, peer, immediate.slot, 0, 0};
    if (!fits(layout_, command)) return -2;
    const int me = layout_.domain_idx;
    if (is_credit) return layout_.credit_idx(me, immediate.ring, peer, immediate.slot);
    const uint32_t flag = layout_.flag_idx(me, immediate.ring, peer, immediate.slot);
    if (immediate.part == Part::kWordAlone) return flag;
    // No slot is used again before its credit, so that the halves of two uses are never on their way at once.
    half_[flag] = !half_[flag];
    return half_[flag] ? -1 : static_cast<int64_t>(flag);
  }

 private:
  const LinkLayout layout_;
  std::vector<bool> half_;  // of each flag: whether one of two has come
};

}  // namespace hybrid_ep
