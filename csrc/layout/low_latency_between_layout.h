// Low-latency calls of several domains: the chunk of a call to each peer, and control memory behind each rank's region.
//
//     of a dispatch: header │ routes [T, parts] │ token of each record [n] │ records [n], each a slot: row and scales
//     of a combine:  header │ place of each record [n]                     │ records [n], each a row
//
// A call has one chunk and one flag for each peer. The link has a ring for each kind of call, with a slot for each
// buffer. So a buffer's chunk is free when the call before in that buffer has been forwarded. Words of the link
// hold the call's number in the buffer and the session. The session names the last barrier or cleaning: numbers of
// calls begin again there, and words of the link are never reset. Legend: T tokens of the sender, M most tokens of a
// rank, K top-k, G ranks of a domain.
#pragma once

#include <cstdint>

#include "layout/grid.h"
#include "layout/link_layout.h"
#include "layout/low_latency_layout.h"

namespace hybrid_ep {

constexpr int kHeaderBytes = 128;
constexpr int64_t kMaxPeerChunkBytes = 1ll << 30;  // what every transport takes in one put
// A rank that forwards waits for a chunk. The other ranks of its domain wait this much longer for the forwarded rows. A
// kernel that receives waits this much longer than the kernel before it.
constexpr uint64_t kForwardNs = 1'000'000'000;

inline int ring_of(LowLatencyKind kind) { return static_cast<int>(kind); }

// The header of a chunk.
struct alignas(16) PeerHeader {
  LowLatencyBegun begun;  // of a dispatch
  LowLatencySent sent;    // of a combine
  uint32_t num_records;
};
static_assert(sizeof(PeerHeader) <= kHeaderBytes);

// The word of a flag or a credit. It is never 0, because no call has number 0.
HYBRID_EP_HOST_DEVICE uint64_t peer_word(uint32_t epoch, uint32_t session) {
  return static_cast<uint64_t>(epoch) << 32 | session;
}

// Where a record of a combine goes, at the domain of its source.
struct RowPlace {
  static constexpr int kTokenBits = 16, kColumnBits = 5;
  int domain_rank, column, token;

  HYBRID_EP_HOST_DEVICE uint32_t pack() const {
    return static_cast<uint32_t>(domain_rank) << (kTokenBits + kColumnBits) |
           static_cast<uint32_t>(column) << kTokenBits | static_cast<uint32_t>(token);
  }
  static HYBRID_EP_HOST_DEVICE RowPlace unpack(uint32_t bits) {
    return {static_cast<int>(bits >> (kTokenBits + kColumnBits)),
            static_cast<int>(bits >> kTokenBits & ((1u << kColumnBits) - 1)),
            static_cast<int>(bits & ((1u << kTokenBits) - 1))};
  }
};
static_assert(kMaxLowLatencyTokens < 1 << RowPlace::kTokenBits && kMaxTopk <= 1 << RowPlace::kColumnBits);

HYBRID_EP_HOST_DEVICE int64_t align_records(int64_t offset) { return (offset + 127) / 128 * 128; }

// Offsets in a chunk of a dispatch; the routes follow the header.
struct TokenChunk {
  int64_t tokens, records;

  static HYBRID_EP_HOST_DEVICE TokenChunk of(const LowLatencyMessage& message, int num_tokens) {
    const int64_t tokens = kHeaderBytes + static_cast<int64_t>(num_tokens) * message.num_route_parts * 16;
    return {tokens, align_records(tokens + 4ll * num_tokens)};
  }
};

// Offset of the records in a chunk of a combine; the places follow the header.
HYBRID_EP_HOST_DEVICE int64_t rows_begin(int num_records) { return align_records(kHeaderBytes + 4ll * num_records); }

// Bytes of a row of a combine as it crosses.
HYBRID_EP_HOST_DEVICE int crossing_bytes(int hidden, bool is_logfmt) {
  return is_logfmt ? (hidden + hidden / 4 + hidden / 16 + 15) / 16 * 16 : 2 * hidden;
}

// Bytes of the largest chunk of each kind, whatever the format.
struct PeerChunkBytes {
  int64_t tokens, rows;

  // To a peer that forwards to a group of so many ranks.
  static PeerChunkBytes of(const LowLatencyShape& shape, int group_size) {
    const LowLatencyMessage message = LowLatencyMessage::of(shape, ScaleFormat::kNone);
    const int64_t num_rows = static_cast<int64_t>(group_size) * shape.max_tokens * shape.num_topk;
    return {
        TokenChunk::of(message, shape.max_tokens).records + static_cast<int64_t>(shape.max_tokens) * message.slot_bytes,
        align_records(kHeaderBytes + 4 * num_rows) + align_records(num_rows * 2 * shape.hidden)};
  }
};

// What a rank tells the others of its domain about a chunk that it forwards.
struct Forwarded {
  static constexpr int kTimeBits = 28;
  FaultKind why;       // it did not come; kNone: it did
  uint32_t waited_us;  // for it

  HYBRID_EP_HOST_DEVICE uint32_t pack() const {
    constexpr uint32_t kMostUs = (1u << kTimeBits) - 1;
    return static_cast<uint32_t>(why) << kTimeBits | (waited_us < kMostUs ? waited_us : kMostUs);
  }
  static HYBRID_EP_HOST_DEVICE Forwarded unpack(uint32_t bits) {
    return {static_cast<FaultKind>(bits >> kTimeBits), bits & ((1u << kTimeBits) - 1)};
  }
};

// One buffer of one kind.
struct LowLatencyBetweenChannel {
  // Written by the rank of the domain that forwards rank i's chunks: Forwarded << 32 | epoch. Stored relaxed, compared
  // for equality.
  uint64_t forwarded[kMaxRanks];
  // Written by this rank.
  uint32_t num_records[kMaxDomains];  // of a dispatch that ships; 0 between kernels
  uint32_t finished_ctas;             // 0 between kernels
};

// Control memory behind each region.
struct LowLatencyBetweenControl {
  LowLatencyBetweenChannel channels[2][kLowLatencyBuffers];  // by LowLatencyKind
  // Written by the host.
  uint32_t session;
  uint32_t first_epoch;  // of a buffer in this session
};

// How the domains are joined, for the kernels that ship and forward.
//
// The ranks of a domain form groups of equal size. The link joins this rank to one rank of each group of other domains:
// the peer, which forwards to its group. A group is the whole domain, or a single rank, which forwards only to itself.
struct LowLatencyPeers {
  Grid grid;  // of groups: its domains are the groups
  int domain_size;
  int64_t control_begin;  // in each region, bytes

  HYBRID_EP_HOST_DEVICE bool is_in_domain(int rank) const { return rank / domain_size == grid.rank / domain_size; }
  // Whether a group is part of this rank's domain, and so is not reached by the link.
  HYBRID_EP_HOST_DEVICE bool is_near(int group) const { return is_in_domain(grid.peer_in(group)); }
};

}  // namespace hybrid_ep
