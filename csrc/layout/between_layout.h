// What the kernels between domains keep: control memory of a rank, records on the wire, and the route of a dispatch.
//
// A token crosses to a remote domain once, to the peer there, as a record of a chunk. The peer forwards the record.
// Between two peers there is one stream of chunks in each direction, numbered over all calls. The first chunks of a
// call hold its counts and verdict, the others its records. Chunk n uses slot n % S of the link's ring in lap n / S.
// Positions of streams live in control memory, not in launch arguments, so that a CUDA graph can be replayed. Legend: T
// tokens, K top-k, E experts, LE local experts, R ranks, D domains, G ranks of a domain, S slots of a ring.
#pragma once

#include <cstdint>

#include "layout/call_fields.h"
#include "layout/grid.h"
#include "layout/limits.h"
#include "layout/link_layout.h"
#include "layout/offsets.h"

namespace hybrid_ep {

constexpr int kRowsPerRecordChunk = 16;  // at most
constexpr int kMinRecordsPerChunk = 2;
constexpr uint32_t kChunkSlotBytes = 256 * 1024;  // 16 rows of 7168 bf16 with top-8; fewer records of longer rows
constexpr int64_t kRingBytes = 64ll << 20;        // of one direction, about
constexpr int kMaxSlotsPerPeer = 128;
constexpr int kMinSlotsPerPeer = 4;
constexpr int kStreamRing = 0;
constexpr int64_t kControlAlignBytes = 128;  // of the parts of control memory
// Up to this many ranks a dispatch sends everyone the counts of all pairs of ranks; above, only those towards the
// receiver's domain.
constexpr int kMaxMatrixRanks = 256;

// The link's ring: what D − 1 peers share of kRingBytes.
inline RingShape stream_ring(int num_domains) {
  const int64_t num_peers = num_domains > 1 ? num_domains - 1 : 1;
  const int64_t share = kRingBytes / kChunkSlotBytes / num_peers;
  const int64_t num_slots = share > kMaxSlotsPerPeer   ? kMaxSlotsPerPeer
                            : share < kMinSlotsPerPeer ? kMinSlotsPerPeer
                                                       : share / kMinSlotsPerPeer * kMinSlotsPerPeer;
  return {kChunkSlotBytes, static_cast<uint32_t>(num_slots), static_cast<uint32_t>(num_slots / kMinSlotsPerPeer)};
}

// What a source publishes of its call, ahead of its counts. The first chunk of a combine begins with its kind, too.
struct CallHeader {
  enum Column {
    kKind,          // CallKind
    kSlotIdx,       // where its rows land; to its own domain
    kRowLimit,      // rows that fit there; to its own domain
    kHeldCapacity,  // records of other domains that its route can hold; to its own domain
    kNumRecords,    // tokens that it sends to the receiving domain
    kRefusal,       // FaultKind: what it has found wrong with its own arguments; then no rank sends
    kRefusedValue,  // the argument
    kFirstField,    // CallField: equal at all ranks, otherwise no rank sends
    kNumColumns = kFirstField + kNumDispatchFields
  };
};

constexpr int32_t kNoRank = 0x7fffffff;

// What a domain finds once it knows all counts towards it; the same at each of its ranks.
struct Verdict {
  int32_t fails, lacks_capacity;
  int32_t overflowing;     // lowest rank with more rows or records than a bound allows; kNoRank
  int32_t allowed, asked;  // rows or records of that rank
  int32_t overflows_held;  // 1: they are records that it forwards
  int32_t max_rows;        // most rows that a rank receives
  int32_t max_sums;        // most rows of others that a rank sums in a combine
  int32_t max_held;        // most records of other domains that a rank forwards
};

// Byte offsets of the parts of control memory behind the ControlBlock. All of it is zero at first.
struct BetweenLayout {
  int num_columns;   // of counts that a source publishes: R, or G of the receiving domain
  int words_stride;  // of one source's words
  // Written by ranks of the domain, at system scope.
  // uint64 [R][words_stride], value << 32 | epoch, relaxed: header, counts by rank, counts of the receiver's experts
  int64_t words;
  // Written by this rank.
  // uint64 [2], a word of dispatch and one of combine: CallStatus << 32 | epoch. The first CTA writes it, the others
  // poll it. That of dispatch is relaxed, because it holds all that is decided. That of combine is stored with release
  // at system scope, and a fence follows its load, so that all CTAs see what the first one has acquired
  int64_t decisions;
  int64_t next_sent;  // RingPlace [D], packed: of this call's first chunk to each peer; stored plainly by the last CTA
  int64_t next_read;  // RingPlace [D], packed: of its first chunk from each peer, likewise
  int64_t rows_written;  // uint32 [D][S] rows written of the chunk in the slot: acq_rel additions at GPU scope
  int64_t rows_read;     // uint32 [D][S] rows read of the chunk in the slot: the same
  int64_t slots_read;    // uint32 [D][S] slots read of each group, in this lap: the same
  // uint32 [kMaxTokens] epoch of the combine that has last summed each part of this domain's rows: release, acquire at
  // GPU scope
  int64_t own_epoch;
  int64_t items;  // uint32 [D] next work index towards each domain, 0 between kernels: relaxed at GPU scope
  int64_t num_bytes;

  static BetweenLayout of(const Grid& grid) {
    BetweenLayout layout{};
    const int64_t num_ranks = grid.num_ranks(), num_domains = grid.num_domains, size = grid.ranks_per_domain;
    const int64_t num_slots = stream_ring(grid.num_domains).num_slots;
    Offsets offsets(kControlAlignBytes);
    layout.num_columns = static_cast<int>(num_ranks <= kMaxMatrixRanks ? num_ranks : size);
    layout.words_stride = CallHeader::kNumColumns + layout.num_columns + kMaxExperts / static_cast<int>(num_ranks);
    layout.words = offsets.append(8 * num_ranks * layout.words_stride);
    layout.decisions = offsets.append(16);
    layout.next_sent = offsets.append(8 * num_domains);
    layout.next_read = offsets.append(8 * num_domains);
    layout.rows_written = offsets.append(4 * num_domains * num_slots);
    layout.rows_read = offsets.append(4 * num_domains * num_slots);
    layout.slots_read = offsets.append(4 * num_domains * num_slots);
    layout.own_epoch = offsets.append(4ll * kMaxTokens);
    layout.items = offsets.append(4 * num_domains);
    layout.num_bytes = offsets.end();
    return layout;
  }
};

// Where a token goes in one column of its top-k: a rank, and its index among what its source sends there. The first
// column that names the rank has it, further ones and −1 have kNowhere.
constexpr uint32_t kNowhere = 0xffffffffu;
HYBRID_EP_HOST_DEVICE uint32_t make_destination(int rank, int index) {
  return static_cast<uint32_t>(rank) << 16 | static_cast<uint32_t>(index);
}
HYBRID_EP_HOST_DEVICE int rank_of_destination(uint32_t destination) { return static_cast<int>(destination >> 16); }
HYBRID_EP_HOST_DEVICE int index_of_destination(uint32_t destination) { return static_cast<int>(destination & 0xffffu); }
static_assert(kMaxTokens <= 1 << 16);

// Byte offsets in a record: a token that crosses to another domain, or the partial row that comes back.
struct RecordLayout {
  int scales, destinations, experts, weights;
  int num_bytes;  // a multiple of kLineBytes
  int per_chunk;

  // Absent parts have 0 columns.
  static RecordLayout of(int64_t row_bytes, int num_scales, int num_destinations, int num_experts, int num_weights) {
    RecordLayout layout{};
    Offsets offsets(1, row_bytes);
    const auto append = [&](int num_words) { return static_cast<int>(offsets.append(4ll * num_words)); };
    layout.scales = append(num_scales);
    layout.destinations = append(num_destinations);
    layout.experts = append(num_experts);
    layout.weights = append(num_weights);
    layout.num_bytes = static_cast<int>((offsets.end() + kLineBytes - 1) / kLineBytes * kLineBytes);
    const int fitting = static_cast<int>(kChunkSlotBytes) / layout.num_bytes;
    layout.per_chunk = fitting < kRowsPerRecordChunk ? fitting : kRowsPerRecordChunk;
    return layout;
  }
};
static_assert(kMinRecordsPerChunk * (kMaxRowBytes + 16 * kMaxTopk + kMaxRowBytes) <= kChunkSlotBytes);

// The route of a dispatch, in int32 from its begin.
struct BetweenRoute {
  int64_t destinations;           // [T, K]
  int64_t domain_list;            // [D, T] the tokens that go to each domain, ascending
  int64_t list_index;             // [D, T] each token's index in that list, or −1
  int64_t rank_counts;            // [R] tokens of this rank to each rank
  int64_t domain_counts;          // [D] to each domain
  int64_t expert_counts;          // [E] to each expert
  int64_t num_records;            // [D] tokens that the peer in each domain sends here; this rank's own in its domain
  int64_t counts;                 // [R, G] tokens of each rank to each rank of this domain
  int64_t rank_prefix;            // [R, R] rows that ranks 0…i send to j; up to kMaxMatrixRanks ranks
  int64_t num_tokens_per_expert;  // [LE]
  int64_t held;                   // [held_capacity, K] destinations of records that have come, by domain and index
  int64_t num_ints;

  static BetweenRoute of(const Grid& grid, int num_tokens, int num_topk, int num_experts, int held_capacity) {
    const int64_t num_ranks = grid.num_ranks(), num_domains = grid.num_domains, size = grid.ranks_per_domain;
    BetweenRoute route{};
    Offsets offsets;
    route.destinations = offsets.append(static_cast<int64_t>(num_tokens) * num_topk);
    route.domain_list = offsets.append(num_domains * num_tokens);
    route.list_index = offsets.append(num_domains * num_tokens);
    route.rank_counts = offsets.append(num_ranks);
    route.domain_counts = offsets.append(num_domains);
    route.expert_counts = offsets.append(num_experts);
    route.num_records = offsets.append(num_domains);
    route.counts = offsets.append(num_ranks * size);
    route.rank_prefix = offsets.append(num_ranks <= kMaxMatrixRanks ? num_ranks * num_ranks : 0);
    route.num_tokens_per_expert = offsets.append(num_experts / num_ranks);
    route.held = offsets.append(static_cast<int64_t>(held_capacity) * num_topk);
    route.num_ints = offsets.end();
    return route;
  }
};

}  // namespace hybrid_ep
