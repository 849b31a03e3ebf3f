// The exchange of counts at the start of a dispatch between domains, and the decision that follows.
//
//     counts ─ chunk 0 ─► peer in each domain ─ words ─► every rank of that domain ─► bases, verdict of the domain
//     verdict ─ chunk 1 ─► peer in each domain ─► decision, the same at all ranks
//
// A pair of peers exchanges O(E/D + G) words and not R + E; words carry the epoch of their call. The first CTA
// publishes; every CTA finds the bases for itself. Functions are collective over the CTA. Legend: E experts, LE local
// experts, R ranks, D domains, G ranks of a domain.
#pragma once

#include "device/refuse.cuh"
#include "kernels/between/chunk_stream.cuh"

namespace hybrid_ep {
namespace {

constexpr int kControlChunks = 2;  // of a call, ahead of its records

// What a CTA knows about the call once the counts are exchanged.
struct CallBetween {
  uint8_t* slot[kMaxRanks];  // of each rank of the domain, as this rank maps it
  int row_limit[kMaxRanks];  // rows that it takes
  int held_capacity[kMaxRanks];
  int needed[kMaxRanks];         // rows that it receives
  int num_sums[kMaxRanks];       // rows that it sums in a combine
  int num_held[kMaxRanks];       // records of other domains that it forwards
  int num_records[kMaxDomains];  // that come from the peer in each domain; in this domain, this rank's tokens
  int held_begin[kMaxDomains];   // of these, where they begin in what the route holds
  int num_sent[kMaxDomains];     // tokens of this rank that go to each domain
  int num_control[kMaxDomains];  // chunks that this rank and its peer in each domain exchange ahead of records
  FirstPlaces first;
  Verdict verdict;
};

__device__ uint64_t* words_of(const BetweenDomain& between, int domain_rank, int source) {
  return between_part<uint64_t>(between, domain_rank, between.layout.words) +
         static_cast<int64_t>(source) * between.layout.words_stride;
}

// The column of a source's words that counts its tokens to a rank of this domain.
__device__ int count_column(const BetweenDomain& between, int domain_rank) {
  const bool has_matrix = between.layout.num_columns == between.grid.num_ranks();
  return CallHeader::kNumColumns + domain_rank +
         (has_matrix ? between.grid.domain_idx() * between.grid.ranks_per_domain : 0);
}

// What this rank publishes in a field. The checksum of a mapping is in device memory only.
__device__ int own_field(const DispatchBetweenParams& params, int field) {
  const bool is_checksum = field == static_cast<int>(CallField::kReplicaMapping) && params.mapping_checksum != nullptr;
  return is_checksum ? static_cast<int>(*params.mapping_checksum) : params.call[field];
}

// What this rank publishes to domain `domain`: header, counts, experts of that domain.
__device__ int told_value(const DispatchBetweenParams& params, int domain, int i) {
  const BetweenDomain& between = params.between;
  const BetweenRoute& parts = params.parts;
  const int num_columns = between.layout.num_columns;
  switch (i) {
    case CallHeader::kKind:
      return static_cast<int>(CallKind::kDispatch);
    case CallHeader::kSlotIdx:
      return params.slot_idx;
    case CallHeader::kRowLimit:
      return params.row_limit;
    case CallHeader::kHeldCapacity:
      return params.held_capacity;
    case CallHeader::kNumRecords:
      return params.route[parts.domain_counts + domain];
    case CallHeader::kRefusal:
    case CallHeader::kRefusedValue: {
      const Refusal refusal = find_refusal(*between.domain.control[between.domain.rank],
                                           static_cast<int>(params.refusal), params.refused_value);
      return i == CallHeader::kRefusal ? refusal.kind : refusal.value;
    }
    default:
      break;
  }
  if (i < CallHeader::kNumColumns) return own_field(params, i - CallHeader::kFirstField);
  const int column = i - CallHeader::kNumColumns;
  if (column < num_columns) {
    const bool has_matrix = num_columns == between.grid.num_ranks();
    return params.route[parts.rank_counts + column + (has_matrix ? 0 : domain * between.grid.ranks_per_domain)];
  }
  const int num_experts = params.num_experts / between.grid.num_domains;
  return params.route[parts.expert_counts + domain * num_experts + column - num_columns];
}

// Publishes a source's values to every rank of the domain. Each rank gets all of them but the counts of other ranks'
// experts. Called by a warp.
template <typename ValueOf>
__device__ void publish(const DispatchBetweenParams& params, uint32_t epoch, int source, ValueOf&& value_of) {
  const BetweenDomain& between = params.between;
  const int num_shared = CallHeader::kNumColumns + between.layout.num_columns;
  const int num_local = params.makes_route ? params.num_experts / between.grid.num_ranks() : 0;
  for (int r = 0; r < between.grid.ranks_per_domain; ++r) {
    uint64_t* words = words_of(between, r, source);
    for (int i = threadIdx.x % 32; i < num_shared + num_local; i += 32) {
      const int value = value_of(i < num_shared ? i : i + r * num_local);
      ptx::store_relaxed_system(words + i, static_cast<uint64_t>(static_cast<uint32_t>(value)) << 32 | epoch);
    }
  }
}

// Publishes this rank's header and counts: to each peer those for its domain, to this domain the others.
template <typename Link>
__device__ bool tell_counts(const DispatchBetweenParams& params, const Waiter& waiter, const Link& link,
                            uint32_t epoch) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const int num_values = CallHeader::kNumColumns + between.layout.num_columns +
                         (params.makes_route ? params.num_experts / grid.num_domains : 0);
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  bool ok = true;
  for (int i = warp; i < grid.num_domains; i += num_warps) {
    const int domain = (grid.domain_idx() + i) % grid.num_domains;
    if (i == 0) {
      publish(params, epoch, grid.rank, [&](int value) { return told_value(params, domain, value); });
      continue;
    }
    const ChunkStream<Link> stream(between, waiter, link, domain);
    if (!__all_sync(kAllLanes, threadIdx.x % 32 > 0 || stream.wait_free(0))) return false;
    __syncwarp();  // passes on what lane 0 has acquired
    auto* values = reinterpret_cast<int32_t*>(stream.send_slot(0));
    for (int v = threadIdx.x % 32; v < num_values; v += 32) values[v] = told_value(params, domain, v);
    ok &= stream.send(0, (4 * num_values + 15) / 16 * 16, 1);
  }
  return ok;
}

// Passes on to this domain what the peers have published. num_read[d] becomes 1 once the chunk of domain d is read.
template <typename Link>
__device__ bool spread_counts(const DispatchBetweenParams& params, const Waiter& waiter, const Link& link,
                              uint32_t epoch, int* num_read) {
  const Grid& grid = params.between.grid;
  const int lane = threadIdx.x % 32;
  for (int i = 1 + threadIdx.x / 32; i < grid.num_domains; i += blockDim.x / 32) {
    const int domain = (grid.domain_idx() + i) % grid.num_domains;
    const ChunkStream<Link> stream(params.between, waiter, link, domain);
    if (!__all_sync(kAllLanes, lane > 0 || stream.wait(0))) return false;
    __syncwarp();
    const auto* values = reinterpret_cast<const int32_t*>(stream.chunk(0));
    publish(params, epoch, grid.peer_in(domain), [&](int value) { return values[value]; });
    if (lane == 0) num_read[domain] = 1;
  }
  return true;
}

// Waits for one word of what a source has published.
__device__ int receive_word(const BetweenDomain& between, const Waiter& waiter, uint32_t epoch, int source, int column,
                            bool* ok) {
  const int publisher = source % between.grid.ranks_per_domain;
  const int peer = publisher == between.domain.rank ? kRankElsewhere + source : publisher;
  uint64_t word = 0;
  *ok &=
      waiter.until_equal(words_of(between, between.domain.rank, source) + column, epoch, peer, WaitTag::kCounts, &word);
  return static_cast<int>(word >> 32);
}

// Waits for words first, first + 1, … of what a source has published. They are loaded together.
template <int kNum>
__device__ void receive_words(const BetweenDomain& between, const Waiter& waiter, uint32_t epoch, int source, int first,
                              int (&values)[kNum], bool* ok) {
  uint64_t words[kNum];
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    words[i] = ptx::load_relaxed_system(words_of(between, between.domain.rank, source) + first + i);
  }
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    const bool is_here = static_cast<uint32_t>(words[i]) == epoch;
    values[i] =
        is_here ? static_cast<int>(words[i] >> 32) : receive_word(between, waiter, epoch, source, first + i, ok);
  }
}

// The number by which a fault names a rank.
__device__ int named(const Grid& grid, int rank) {
  const bool is_here = rank / grid.ranks_per_domain == grid.domain_idx();
  return is_here ? rank % grid.ranks_per_domain : kRankElsewhere + rank;
}

// Whether a source has not refused its call; the first CTA reports a refusal, unless this rank refuses the call.
__device__ bool accepts_call(const DispatchBetweenParams& params, const int* header, int source) {
  const BetweenDomain& between = params.between;
  const auto refusal = static_cast<FaultKind>(header[CallHeader::kRefusal]);
  if (refusal == FaultKind::kNone) return true;
  if (params.refusal == FaultKind::kRefused) return false;
  // This rank's host has reported its own refusal.
  if (blockIdx.x == 0 && (source != between.grid.rank || refusal == FaultKind::kBadExpert)) {
    report_refusal(between.domain.fault, KernelName::kDispatchBetween, refusal, between.domain.rank,
                   named(between.grid, source), params.num_experts, params.common_bound, params.max_tokens,
                   header[CallHeader::kRefusedValue]);
  }
  return false;
}

// Whether a source has the mapping of another domain.
__device__ bool is_of_other_mapping(const DispatchBetweenParams& params, int source) {
  if (params.mapping_checksum == nullptr) return false;
  return source / params.num_mapped_ranks != params.between.grid.rank / params.num_mapped_ranks;
}

// Whether a source has the mapping of the first rank that must have the same one. So every rank finds mappings of other
// domains that differ.
__device__ bool has_same_mapping(const DispatchBetweenParams& params, const Waiter& waiter, uint32_t epoch,
                                 const int* header, int source, bool* ok) {
  const BetweenDomain& between = params.between;
  const int first = source / params.num_mapped_ranks * params.num_mapped_ranks;
  const auto of_first = [&](int column) { return receive_word(between, waiter, epoch, first, column, ok); };
  // Another kind of call of the first rank, or a refusal, is reported for that rank.
  if (of_first(CallHeader::kKind) != static_cast<int>(CallKind::kDispatch)) return true;
  if (of_first(CallHeader::kRefusal) != static_cast<int>(FaultKind::kNone)) return true;
  constexpr int kColumn = CallHeader::kFirstField + static_cast<int>(CallField::kReplicaMapping);
  const int expected = of_first(kColumn);
  if (header[kColumn] == expected || !*ok) return true;
  if (blockIdx.x == 0) {
    report_other_call(between.domain.fault, KernelName::kDispatchBetween, CallField::kReplicaMapping,
                      between.domain.rank, named(between.grid, source), expected, header[kColumn],
                      named(between.grid, first));
  }
  return false;
}

// Whether a source makes the same call; the first CTA reports where it does not.
__device__ bool makes_same_call(const DispatchBetweenParams& params, const Waiter& waiter, uint32_t epoch,
                                const int* header, int source, bool* ok) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const auto is_same = [&](CallField field, int mine, int theirs) {
    if (theirs == mine) return true;
    if (blockIdx.x == 0) {
      report_other_call(between.domain.fault, KernelName::kDispatchBetween, field, grid.domain_rank(),
                        named(grid, source), mine, theirs);
    }
    return false;
  };
  // A rank that refuses its call compares nothing: its host raises.
  if (params.refusal == FaultKind::kRefused) return true;
  // The header of another kind of call has only the kind, and that of a refused call only the kind and the refusal.
  if (!is_same(CallField::kCall, static_cast<int>(CallKind::kDispatch), header[CallHeader::kKind])) return false;
  if (static_cast<FaultKind>(header[CallHeader::kRefusal]) == FaultKind::kRefused) return true;
#pragma unroll
  for (int i = 0; i < kNumDispatchFields; ++i) {
    const auto field = static_cast<CallField>(i);
    if (field == CallField::kReplicaMapping && is_of_other_mapping(params, source)) {
      if (!has_same_mapping(params, waiter, epoch, header, source, ok)) return false;
      continue;
    }
    if (!is_same(field, own_field(params, i), header[CallHeader::kFirstField + i])) return false;
  }
  return true;
}

// Waits for the headers of all ranks. Returns whether all came; *is_same becomes whether all calls are equal.
__device__ bool receive_headers(const DispatchBetweenParams& params, const Waiter& waiter, uint32_t epoch,
                                CallBetween& call, bool* is_same) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const int size = grid.ranks_per_domain;
  bool ok = true, same = true;
  for (int r = threadIdx.x; r < size; r += blockDim.x) call.num_held[r] = call.num_sums[r] = 0;
  for (int d = threadIdx.x; d < grid.num_domains; d += blockDim.x) {
    call.num_sent[d] = params.route[params.parts.domain_counts + d];
    call.num_control[d] = kControlChunks;
  }
  call.first.load(between);
  __syncthreads();
  for (int source = threadIdx.x; source < grid.num_ranks(); source += blockDim.x) {
    int header[CallHeader::kNumColumns];
    receive_words(between, waiter, epoch, source, 0, header, &ok);
    if (!ok) break;
    same &= makes_same_call(params, waiter, epoch, header, source, &ok);
    same &= accepts_call(params, header, source);
    const int r = source % size, domain = source / size;
    if (r == between.domain.rank) {
      call.num_records[domain] = header[CallHeader::kNumRecords];
      // A peer in another kind of call exchanges no verdict.
      if (header[CallHeader::kKind] != static_cast<int>(CallKind::kDispatch)) call.num_control[domain] = 1;
    }
    if (domain == grid.domain_idx()) {
      call.slot[r] = between.domain.arena[r] + header[CallHeader::kSlotIdx] * between.domain.slot_bytes;
      call.row_limit[r] = header[CallHeader::kRowLimit];
      call.held_capacity[r] = header[CallHeader::kHeldCapacity];
    } else {
      atomicAdd(&call.num_held[r], header[CallHeader::kNumRecords]);
    }
  }
  *is_same = __syncthreads_and(same);
  return __syncthreads_and(ok);
}

// Finds the row, at each rank of the domain, of the first token of each source that this rank forwards: base[d × G + r]
// for its peer in domain d. `totals` is scratch of as many. The first CTA writes the counts to the route.
__device__ bool find_dispatch_bases_between(const DispatchBetweenParams& params, const Waiter& waiter, uint32_t epoch,
                                            CallBetween& call, int* base, int* totals) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const int size = grid.ranks_per_domain;
  bool ok = true;
  for (int cell = threadIdx.x; cell < grid.num_domains * size; cell += blockDim.x) {
    const int domain = cell / size, r = cell % size, column = count_column(between, r);
    int total = 0;
    for (int g = 0; g < size; ++g) {
      const int source = domain * size + g;
      if (g == between.domain.rank) base[cell] = total;
      const int count = receive_word(between, waiter, epoch, source, column, &ok);
      if (!ok) break;
      total += count;
      if (r != g) atomicAdd(&call.num_sums[g], count);
      if (blockIdx.x == 0) params.route[params.parts.counts + static_cast<int64_t>(source) * size + r] = count;
    }
    totals[cell] = total;
  }
  ok = __syncthreads_and(ok);
  for (int r = threadIdx.x; r < size; r += blockDim.x) {
    int begin = 0;
    for (int d = 0; d < grid.num_domains; ++d) {
      base[d * size + r] += begin;
      begin += totals[d * size + r];
    }
    call.needed[r] = begin;
  }
  if (threadIdx.x == 0) {
    int begin = 0;
    for (int d = 0; d < grid.num_domains; ++d) {
      call.held_begin[d] = begin;
      if (d != grid.domain_idx()) begin += call.num_records[d];
    }
  }
  __syncthreads();
  return ok;
}

// The domain's verdict, the same at each of its ranks. Called by one thread.
__device__ Verdict judge(const DispatchBetweenParams& params, const CallBetween& call, bool fails) {
  const Grid& grid = params.between.grid;
  Verdict verdict{fails, 0, kNoRank, 0, 0, 0, 0, 0, 0};
  // A bounded call needs the capacity that all have agreed on; its counts may ask for less.
  if (!fails && params.is_bounded && params.common_bound > params.slot.capacity) {
    verdict.lacks_capacity = 1;
    verdict.max_rows = params.common_bound;
    return verdict;
  }
  for (int r = 0; r < grid.ranks_per_domain && !fails; ++r) {
    verdict.max_rows = max(verdict.max_rows, call.needed[r]);
    verdict.max_sums = max(verdict.max_sums, call.num_sums[r]);
    verdict.max_held = max(verdict.max_held, call.num_held[r]);
    const bool rows_fit = call.needed[r] <= call.row_limit[r];
    const bool held_fit = !params.makes_route || call.num_held[r] <= call.held_capacity[r];
    if (!params.is_bounded) {
      verdict.lacks_capacity |= !rows_fit || !held_fit;
      continue;
    }
    if (!held_fit) verdict.fails = 1;
    if ((rows_fit && held_fit) || verdict.overflowing != kNoRank) continue;
    verdict.overflowing = grid.domain_idx() * grid.ranks_per_domain + r;
    verdict.allowed = rows_fit ? call.held_capacity[r] : call.row_limit[r];
    verdict.asked = rows_fit ? call.num_held[r] : call.needed[r];
    verdict.overflows_held = rows_fit;
  }
  return verdict;
}

// Exchanges verdicts with the peers; call.verdict becomes that of all domains. Every rank reports the same overflow,
// because sums lack its rows. num_read[d] becomes kControlChunks once the verdict of domain d is read.
template <typename Link>
__device__ bool agree(const DispatchBetweenParams& params, const Waiter& waiter, const Link& link, CallBetween& call,
                      int* num_read) {
  const BetweenDomain& between = params.between;
  const Grid& grid = between.grid;
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, lane = threadIdx.x % 32;
  bool ok = true, has_lost = false;
  const Verdict own = call.verdict;
  __syncthreads();
  const auto domain_of = [&](int i) { return (grid.domain_idx() + i) % grid.num_domains; };
  const auto has_verdict = [&](int i) { return call.num_control[domain_of(i)] == kControlChunks; };
  for (int i = 1 + warp; i < grid.num_domains && ok; i += num_warps) {
    if (!has_verdict(i)) continue;
    const ChunkStream<Link> stream(between, waiter, link, domain_of(i), call.first);
    ok = __all_sync(kAllLanes, lane > 0 || stream.wait_free(1));
    if (!ok) break;
    if (lane == 0) *reinterpret_cast<Verdict*>(stream.send_slot(1)) = own;
    ok = stream.send(1, (sizeof(Verdict) + 15) / 16 * 16, 1);
  }
  for (int i = 1 + warp; i < grid.num_domains && lane == 0 && ok; i += num_warps) {
    if (!has_verdict(i)) continue;
    const ChunkStream<Link> stream(between, waiter, link, domain_of(i), call.first);
    ok = stream.wait(1);
    if (!ok) break;
    const Verdict theirs = *reinterpret_cast<const Verdict*>(stream.chunk(1));
    // Every rank sees wrong calls by itself. So if only the other domain fails, a rank has not reached that domain. The
    // fault names the peer there, which can name that rank. Other peers may have found nothing wrong: the ranks of this
    // domain then send, and must not take this rank's rows for complete.
    if (own.fails == 0 && theirs.fails != 0 && theirs.overflowing == kNoRank) {
      has_lost = true;
      report_fault(between.domain.fault, FaultKind::kTimeout, KernelName::kDispatchBetween, WaitTag::kCounts,
                   between.domain.rank, kRankElsewhere + grid.peer_in(domain_of(i)), 0, 0);
    }
    atomicMax(&call.verdict.fails, theirs.fails);
    atomicMax(&call.verdict.lacks_capacity, theirs.lacks_capacity);
    atomicMin(&call.verdict.overflowing, theirs.overflowing);
    atomicMax(&call.verdict.max_rows, theirs.max_rows);
    atomicMax(&call.verdict.max_sums, theirs.max_sums);
    atomicMax(&call.verdict.max_held, theirs.max_held);
  }
  ok = __syncthreads_and(ok);
  const auto report = [&](const Verdict& verdict) {
    if (verdict.overflowing == kNoRank || verdict.overflowing != call.verdict.overflowing) return;
    report_fault(between.domain.fault, FaultKind::kOverflow, KernelName::kDispatchBetween,
                 verdict.overflows_held ? WaitTag::kHeld : WaitTag::kRows, between.domain.rank,
                 named(grid, verdict.overflowing), verdict.allowed, verdict.asked);
  };
  if (threadIdx.x == 0 && ok) report(own);
  for (int i = 1 + warp; i < grid.num_domains && lane == 0 && ok; i += num_warps) {
    if (!has_verdict(i)) continue;
    const ChunkStream<Link> stream(between, waiter, link, domain_of(i), call.first);
    report(*reinterpret_cast<const Verdict*>(stream.chunk(1)));
    num_read[domain_of(i)] = kControlChunks;
  }
  return ok && !has_lost;
}

// Returns the credits of the chunks that have been read ahead of records. Nobody waits for them now, and a credit waits
// for everything that its thread has stored.
template <typename Link>
__device__ bool return_control_chunks(const DispatchBetweenParams& params, const Waiter& waiter, const Link& link,
                                      const CallBetween& call, const int* num_read) {
  bool ok = true;
  for (int d = threadIdx.x; d < params.between.grid.num_domains; d += blockDim.x) {
    const ChunkStream<Link> stream(params.between, waiter, link, d, call.first);
    for (int chunk = 0; chunk < num_read[d]; ++chunk) ok &= stream.read_rows(chunk, 1, 1);
  }
  return ok;
}

}  // namespace
}  // namespace hybrid_ep
