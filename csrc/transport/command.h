// A command of a kernel to the proxy: 16 bytes, stored and loaded as one.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "layout/link_layout.h"

namespace hybrid_ep {

enum class CommandKind : uint32_t {
  kPut = 1,     // write the first num_bytes of a send slot to the peer, then `word` to the slot's flag there
  kCredit = 2,  // write `word` to the peer's credit of a group of slots
  kEnd = 3      // the call has no more commands
};

struct Command {
  CommandKind kind;
  int ring, peer;      // the peer's domain index
  int slot;            // of a credit: its group
  uint32_t num_bytes;  // of a put: a multiple of 16, up to slot_bytes; 0 writes the flag alone
  uint64_t word;       // not 0
};

// A command in the FIFO. The parity in its last word shows whether it has come.
struct alignas(16) PackedCommand {
  uint32_t word_low, word_high, num_bytes, head;
};
static_assert(sizeof(PackedCommand) == 16);
constexpr int kKindBits = 3, kRingBits = 4, kPeerBits = 8, kSlotBits = 16;
static_assert(1 + kKindBits + kRingBits + kPeerBits + kSlotBits <= 32);
static_assert(kMaxRings <= 1 << kRingBits && kMaxDomains <= 1 << kPeerBits && kMaxSlots <= 1 << kSlotBits);

// `phase` is 0 or 1: it distinguishes the laps of the FIFO.
HYBRID_EP_HOST_DEVICE PackedCommand pack(const Command& command, uint32_t phase) {
  uint32_t head = static_cast<uint32_t>(command.slot);
  head = head << kPeerBits | static_cast<uint32_t>(command.peer);
  head = head << kRingBits | static_cast<uint32_t>(command.ring);
  head = head << kKindBits | static_cast<uint32_t>(command.kind);
  return {static_cast<uint32_t>(command.word), static_cast<uint32_t>(command.word >> 32), command.num_bytes,
          head << 1 | phase};
}

HYBRID_EP_HOST_DEVICE uint32_t phase_of(uint32_t head) { return head & 1; }

HYBRID_EP_HOST_DEVICE Command unpack(const PackedCommand& packed) {
  uint32_t head = packed.head >> 1;
  const auto take = [&head](int num_bits) {
    const uint32_t bits = head & ((1u << num_bits) - 1);
    head >>= num_bits;
    return static_cast<int>(bits);
  };
  Command command{};
  command.kind = static_cast<CommandKind>(take(kKindBits));
  command.ring = take(kRingBits);
  command.peer = take(kPeerBits);
  command.slot = take(kSlotBits);
  command.num_bytes = packed.num_bytes;
  command.word = static_cast<uint64_t>(packed.word_high) << 32 | packed.word_low;
  return command;
}

// Whether the layout has the ring, peer and slot that a put or credit names.
inline bool fits(const LinkLayout& layout, const Command& command) {
  if (command.ring >= layout.num_rings || !layout.joins(command.peer)) {
    return false;
  }
  const RingShape& ring = layout.rings[command.ring];
  const auto slot = static_cast<uint32_t>(command.slot);
  if (command.kind == CommandKind::kCredit) return slot < ring.num_credits();
  return slot < ring.num_slots && command.num_bytes <= ring.slot_bytes && command.num_bytes % 16 == 0;
}

}  // namespace hybrid_ep
