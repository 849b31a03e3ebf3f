// Offsets of the chunks, flags and credits of a link. A link joins a rank to its peers: the ranks with its domain rank
// in the other domains. Every rank has one window, and all windows have the same shape.
//
// A link can also join single ranks. Then each rank counts as a domain here, and num_near of these in a row share an
// NVLink domain. They have no slots for each other.
//
//     window: per ring and peer  send slots │ per ring and peer  receive slots
//     words:  per ring and peer  a flag for each receive slot │ per ring and peer  a credit for each group of send
//     slots
//
// A chunk is built in the send slot (ring, peer, slot) of the sender. It arrives in the receive slot (ring, sender,
// slot) of the peer. Each chunk has its own flag, a 64-bit word that is written when the whole chunk has arrived. Flags
// and credits are loaded with acquire at system scope: a thread that has seen a flag sees its chunk, and one that has
// seen a credit may write the slots. The receiver returns a credit when it has read a group of slots. The credit is a
// word at the sender, and also frees the group's send slots.
//
// The link never interprets words. Users of words keep these rules, which make any order of delivery correct:
// - Words are 0 at first and are never reset. A new value differs from the old one.
// - A slot is written again, and its flag with it, only after the sender has seen the credit of its group. A credit is
//   returned again only after the receiver has seen a flag of the group's next use. So no two writes to one word are
//   ever in flight at once.
// - Nothing orders one slot's flag after another slot's chunk.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "layout/limits.h"

namespace hybrid_ep {

constexpr int kMaxRings = 4;               // of a link: for example counts, rows of dispatch, rows of combine
constexpr int kMaxSlots = 1 << 16;         // of a ring and peer
constexpr uint32_t kSlotAlignBytes = 128;  // of send and receive slots

// What a flag holds about its chunk. A call's epoch is not 0; the lap counts the uses of a slot within the call.
HYBRID_EP_HOST_DEVICE uint64_t chunk_word(uint32_t epoch, uint32_t lap, uint32_t num_rows) {
  return static_cast<uint64_t>(epoch) << 32 | (lap & 0xffffu) << 16 | num_rows;
}
HYBRID_EP_HOST_DEVICE uint32_t chunk_rows(uint64_t word) { return static_cast<uint32_t>(word) & 0xffffu; }
// Whether the flag's word belongs to this use of the slot.
HYBRID_EP_HOST_DEVICE bool is_chunk(uint64_t word, uint32_t epoch, uint32_t lap) {
  return word >> 16 == (static_cast<uint64_t>(epoch) << 16 | (lap & 0xffffu));
}

struct RingShape {
  uint32_t slot_bytes;        // of a chunk at most; a multiple of kSlotAlignBytes
  uint32_t num_slots;         // per peer, in each direction
  uint32_t slots_per_credit;  // divides num_slots

  HYBRID_EP_HOST_DEVICE uint32_t num_credits() const { return num_slots / slots_per_credit; }
};

// Where a chunk stands in a ring: its slot, and how often the ring was filled before.
struct RingPlace {
  uint64_t lap;
  uint32_t slot;

  static HYBRID_EP_HOST_DEVICE RingPlace unpack(uint64_t word) {
    return {word >> 16, static_cast<uint32_t>(word) & 0xffffu};
  }
  HYBRID_EP_HOST_DEVICE uint64_t pack() const { return lap << 16 | slot; }

  // The place of the chunk that comes num_chunks later.
  HYBRID_EP_HOST_DEVICE RingPlace after(int num_chunks, const RingShape& shape) const {
    const uint32_t at = slot + static_cast<uint32_t>(num_chunks);
    return {lap + at / shape.num_slots, at % shape.num_slots};
  }
};
static_assert(kMaxSlots <= 1 << 16);

struct LinkLayout {
  int num_domains, domain_idx;  // of this rank
  int num_near;                 // domains in a row that the link does not join to each other; 1: it joins all
  int num_rings;
  RingShape rings[kMaxRings];
  uint64_t ring_begin[kMaxRings];     // of the ring's send slots in the window; its receive slots follow
  uint32_t flags_begin[kMaxRings];    // in words
  uint32_t credits_begin[kMaxRings];  // in words
  uint64_t window_bytes;
  uint32_t num_words;

  HYBRID_EP_HOST_DEVICE int num_peers() const { return num_domains - num_near; }
  // Whether the link joins this rank to that of another domain.
  HYBRID_EP_HOST_DEVICE bool joins(int domain) const {
    return domain >= 0 && domain < num_domains && domain / num_near != domain_idx / num_near;
  }

  // Offsets in the window and in the words of the rank of domain `owner`, for its peer of domain `peer`.
  HYBRID_EP_HOST_DEVICE uint64_t send_offset(int owner, int ring, int peer, int slot) const {
    return ring_begin[ring] + slot_offset(owner, ring, peer, slot);
  }
  HYBRID_EP_HOST_DEVICE uint64_t recv_offset(int owner, int ring, int peer, int slot) const {
    return ring_begin[ring] + ring_bytes(ring) + slot_offset(owner, ring, peer, slot);
  }
  HYBRID_EP_HOST_DEVICE uint32_t flag_idx(int owner, int ring, int peer, int slot) const {
    return flags_begin[ring] + peer_idx(owner, peer) * rings[ring].num_slots + slot;
  }
  HYBRID_EP_HOST_DEVICE uint32_t credit_idx(int owner, int ring, int peer, int group) const {
    return credits_begin[ring] + peer_idx(owner, peer) * rings[ring].num_credits() + group;
  }
  // Bytes of a ring's slots in one direction, to all peers.
  HYBRID_EP_HOST_DEVICE uint64_t ring_bytes(int ring) const {
    return static_cast<uint64_t>(num_peers()) * rings[ring].num_slots * rings[ring].slot_bytes;
  }

 private:
  // A rank has no slots for its own domain, nor for those near it.
  HYBRID_EP_HOST_DEVICE uint32_t peer_idx(int owner, int peer) const { return peer < owner ? peer : peer - num_near; }
  HYBRID_EP_HOST_DEVICE uint64_t slot_offset(int owner, int ring, int peer, int slot) const {
    return (static_cast<uint64_t>(peer_idx(owner, peer)) * rings[ring].num_slots + slot) * rings[ring].slot_bytes;
  }
};

// Host only. Offsets of any number of domains and of any rings.
LinkLayout arrange_link(int num_domains, int domain_idx, int num_near, const RingShape* rings, int num_rings);
// The layout of a link, checked. Throws std::invalid_argument for shapes that are not allowed.
LinkLayout make_link_layout(int num_domains, int domain_idx, int num_near, const RingShape* rings, int num_rings);

}  // namespace hybrid_ep
