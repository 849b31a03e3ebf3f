// The stream of chunks between this rank and its peer in another domain: layout/between_layout.h.
//
//     sender: wait_free(n) ─► send_slot(n) ─ write_rows(n) ─► receiver: wait(n) ─► chunk(n) ─ read_rows(n) ─► credit
//
// Several warps may write a chunk's rows, and several may read them. The one that writes the last row sends the chunk,
// and the one that reads the last row returns the credit.
//
// A chunk's flag names the use of its slot, so that chunks may come in any order.
#pragma once

#include "device/lanes.cuh"
#include "device/wait.cuh"
#include "kernels/between/params.h"
#include "transport/links.cuh"

namespace hybrid_ep {
namespace {

// A fault names a rank of this domain by its domain rank, and any other rank by this constant + its global rank.
constexpr int kRankElsewhere = kMaxRanks;

// A CTA that waits for another CTA of this rank waits this much longer. The other CTA waits for another rank, and must
// report first.
__device__ Waiter waiter_of_own(const Domain& domain, KernelName kernel) {
  return {domain.fault, kernel, domain.rank, domain.timeout_ns + 2 * kListenNs, domain.control, domain.num_ranks};
}

template <typename T>
__device__ T* between_part(const BetweenDomain& between, int domain_rank, int64_t offset) {
  return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(between.domain.control[domain_rank] + 1) + offset);
}
template <typename T>
__device__ T* own_part(const BetweenDomain& between, int64_t offset) {
  return between_part<T>(between, between.domain.rank, offset);
}

// The place of the call's first chunk to or from a domain; `offset` is next_sent or next_read of the layout.
__device__ RingPlace next_place(const BetweenDomain& between, int64_t offset, int domain) {
  return RingPlace::unpack(own_part<uint64_t>(between, offset)[domain]);
}

// Advances the places at the end of a call, in the last CTA, by the chunks sent to a domain and read from it.
__device__ void advance_stream(const BetweenDomain& between, int domain, int num_sent, int num_read) {
  const RingShape& shape = between.link.layout.rings[kStreamRing];
  const auto advance = [&](int64_t offset, int num_chunks) {
    uint64_t& place = own_part<uint64_t>(between, offset)[domain];
    place = RingPlace::unpack(place).after(num_chunks, shape).pack();
  };
  advance(between.layout.next_sent, num_sent);
  advance(between.layout.next_read, num_read);
}

// The places of the call's first chunks to and from every domain, for the warps of a CTA, in shared memory. A load from
// global memory takes as long as several pieces of a row.
struct FirstPlaces {
  RingPlace sent[kMaxDomains], read[kMaxDomains];

  // Collective over the CTA; a barrier must follow.
  __device__ void load(const BetweenDomain& between) {
    for (int d = threadIdx.x; d < between.grid.num_domains; d += blockDim.x) {
      sent[d] = next_place(between, between.layout.next_sent, d);
      read[d] = next_place(between, between.layout.next_read, d);
    }
  }
};

template <typename Link>
class ChunkStream {
 public:
  __device__ ChunkStream(const BetweenDomain& between, const Waiter& waiter, const Link& link, int domain)
      : ChunkStream(between, waiter, link, domain, next_place(between, between.layout.next_sent, domain),
                    next_place(between, between.layout.next_read, domain)) {}
  __device__ ChunkStream(const BetweenDomain& between, const Waiter& waiter, const Link& link, int domain,
                         const FirstPlaces& first)
      : ChunkStream(between, waiter, link, domain, first.sent[domain], first.read[domain]) {}

  // Chunks are numbered within the call.

  // Whether the peer has read the last chunk of this slot. If so, the calling thread may write the slot.
  __device__ bool is_free(int chunk) const {
    const RingPlace place = first_sent_.after(chunk, shape_);
    const int group = static_cast<int>(place.slot / shape_.slots_per_credit);
    return place.lap == 0 || link_.poll_credit(kStreamRing, domain_, group) >= place.lap;
  }

  // How many chunks, from this one on, are free if this one is: a credit is for several slots.
  __device__ int num_with_credit(int chunk) const {
    const uint32_t per_credit = shape_.slots_per_credit;
    return static_cast<int>(per_credit - first_sent_.after(chunk, shape_).slot % per_credit);
  }

  // Waits until is_free(chunk).
  __device__ bool wait_free(int chunk) const {
    return waiter_.until([&] { return is_free(chunk); }, lost(), static_cast<uint32_t>(chunk), peer_,
                         WaitTag::kCredits);
  }

  __device__ uint8_t* send_slot(int chunk) const {
    return link_.send_slot(kStreamRing, domain_, slot_of(first_sent_.after(chunk, shape_)));
  }

  // Sends what the lanes and their bulk stores have written. Collective over the warp.
  __device__ bool send(int chunk, uint32_t num_bytes, int num_rows) const {
    __syncwarp();
    return __all_sync(kAllLanes, threadIdx.x % 32 > 0 || send_by_thread(chunk, num_bytes, num_rows));
  }

  // send() by one thread that has observed all writes of the chunk.
  __device__ bool send_by_thread(int chunk, uint32_t num_bytes, int num_rows) const {
    const RingPlace place = first_sent_.after(chunk, shape_);
    const uint64_t word = (place.lap + 1) << 16 | static_cast<uint32_t>(num_rows);
    return link_.put_signal(kStreamRing, domain_, slot_of(place), num_bytes, word, gives_up()) || give_up_command();
  }

  // Counts rows of a chunk as written, of `num_rows` in all, and sends the chunk of num_bytes if all are. Collective
  // over the warp, after its bulk stores.
  __device__ bool write_rows(int chunk, int num_written, int num_rows, uint32_t num_bytes) const {
    __syncwarp();
    return __all_sync(kAllLanes, threadIdx.x % 32 > 0 || write_rows_by_thread(chunk, num_written, num_rows, num_bytes));
  }

  // write_rows() by one thread that has observed the writes of these rows.
  __device__ bool write_rows_by_thread(int chunk, int num_written, int num_rows, uint32_t num_bytes) const {
    if (num_written < num_rows) {
      uint32_t* rows_written = own_part<uint32_t>(between_, between_.layout.rows_written) +
                               domain_ * static_cast<int>(shape_.num_slots) + slot_of(first_sent_.after(chunk, shape_));
      if (ptx::add_acq_rel_gpu(rows_written, num_written) + num_written < static_cast<uint32_t>(num_rows)) return true;
      *rows_written = 0;
    }
    return send_by_thread(chunk, num_bytes, num_rows);
  }

  // Whether the chunk has arrived. Acquires for the calling thread.
  __device__ bool is_here(int chunk) const {
    const RingPlace place = first_read_.after(chunk, shape_);
    return link_.poll(kStreamRing, domain_, slot_of(place)) >> 16 == place.lap + 1;
  }

  // Waits until the chunk has arrived.
  __device__ bool wait(int chunk) const {
    return waiter_.until([&] { return is_here(chunk); }, lost(), static_cast<uint32_t>(chunk), peer_,
                         WaitTag::kRecords);
  }

  __device__ const uint8_t* chunk(int chunk) const {
    return link_.recv_slot(kStreamRing, domain_, slot_of(first_read_.after(chunk, shape_)));
  }

  // Counts rows of a chunk as read, of `num_rows` in all, and returns the credit of a group that has been read. One
  // thread, after all reads.
  __device__ bool read_rows(int chunk, int num_read, int num_rows) const {
    uint32_t* rows_read = rows_read_of(chunk);
    if (num_read < num_rows) {
      if (ptx::add_acq_rel_gpu(rows_read, num_read) + num_read < static_cast<uint32_t>(num_rows)) return true;
      *rows_read = 0;
    }
    return read_chunk(chunk);
  }

  // Returns a function for Waiter::until: 0 while the link works, otherwise the failure as Waiter::lose takes it.
  __device__ auto lost() const {
    return [this]() -> uint32_t {
      const uint32_t failure = link_.failure();
      return failure < failure_word(0) ? failure
                                       : 2 + kRankElsewhere + between_.grid.peer_in(failure - failure_word(0));
    };
  }

 private:
  __device__ ChunkStream(const BetweenDomain& between, const Waiter& waiter, const Link& link, int domain,
                         const RingPlace& first_sent, const RingPlace& first_read)
      : between_(between),
        waiter_(waiter),
        link_(link),
        domain_(domain),
        peer_(kRankElsewhere + between.grid.peer_in(domain)),
        shape_(between.link.layout.rings[kStreamRing]),
        first_sent_(first_sent),
        first_read_(first_read) {}

  __device__ uint32_t* rows_read_of(int chunk) const {
    return own_part<uint32_t>(between_, between_.layout.rows_read) + domain_ * static_cast<int>(shape_.num_slots) +
           slot_of(first_read_.after(chunk, shape_));
  }

  // Counts a chunk as read, and returns the credit of a group that has been read. One thread.
  __device__ bool read_chunk(int chunk) const {
    const RingPlace place = first_read_.after(chunk, shape_);
    const int group = slot_of(place) / static_cast<int>(shape_.slots_per_credit);
    uint32_t* slots_read =
        own_part<uint32_t>(between_, between_.layout.slots_read) + domain_ * static_cast<int>(shape_.num_slots) + group;
    if (ptx::add_acq_rel_gpu(slots_read, 1) + 1 < shape_.slots_per_credit) return true;
    *slots_read = 0;
    return link_.credit(kStreamRing, domain_, group, place.lap + 1, gives_up()) || give_up_command();
  }

  static __device__ int slot_of(const RingPlace& place) { return static_cast<int>(place.slot); }
  __device__ auto gives_up() const {
    return [this] { return waiter_.expired() || link_.failure() != 0; };
  }
  // Called when a FIFO is full.
  __device__ bool give_up_command() const {
    const uint32_t found = lost()();
    return found != 0 ? waiter_.lose(found, peer_, WaitTag::kCommands, 0) : waiter_.sends(false, peer_);
  }

  const BetweenDomain& between_;
  const Waiter& waiter_;
  const Link& link_;
  const int domain_, peer_;
  const RingShape& shape_;
  const RingPlace first_sent_, first_read_;
};

}  // namespace
}  // namespace hybrid_ep
