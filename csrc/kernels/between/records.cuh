// How the warps of a rank share the records of its streams: parts of chunks, by work index.
//
//     counter ─► part ─► chunk n of each peer in turn, its parts one after the other, then chunk n + 1
//
// Several warps work on a chunk, so that it is complete soon after its first record. A dispatch claims its last records
// one by one, so that all warps end together.
#pragma once

#include "device/work_index.cuh"
#include "layout/between_layout.h"

namespace hybrid_ep {
namespace {

constexpr int kRowsOfPart = 4;  // of a chunk, that a warp claims at once

__device__ int num_chunks(const RecordLayout& layout, int num_records) {
  return (num_records + layout.per_chunk - 1) / layout.per_chunk;
}

// The parts of all chunks of a stream are numbered. No part belongs to two chunks.
__device__ int parts_per_chunk(const RecordLayout& layout) {
  return (layout.per_chunk + kRowsOfPart - 1) / kRowsOfPart;
}
__device__ int part_of(const RecordLayout& layout, int record) {
  return record / layout.per_chunk * parts_per_chunk(layout) + record % layout.per_chunk / kRowsOfPart;
}
// Where the part ends that begins with a record.
__device__ int end_of_part(const RecordLayout& layout, int begin, int num_records) {
  const int chunk_end = (begin / layout.per_chunk + 1) * layout.per_chunk;
  return min(begin + kRowsOfPart, min(chunk_end, num_records));
}
__device__ int first_record(const RecordLayout& layout, int part) {
  const int num_parts = parts_per_chunk(layout);
  return part / num_parts * layout.per_chunk + part % num_parts * kRowsOfPart;
}

// A record of the stream to or from another domain.
struct Record {
  int domain, index;      // of the domain's records
  int chunk;              // of the call
  int begin, end;         // of the warp's part of the chunk
  int num_chunk_records;  // of the whole chunk

  __device__ bool is_first() const { return index == begin; }
  __device__ bool is_last() const { return index == end - 1; }
  __device__ int part_size() const { return end - begin; }
};

// Hands out the records of all other domains. Collective over the warp.
class Records {
 public:
  // `num_records` of each domain, in shared or global memory; they follow num_control_chunks of the call. `counter` is
  // 0 before the kernel. num_warps share the records.
  __device__ Records(const Grid& grid, const RecordLayout& layout, int num_control_chunks, const int* num_records,
                     uint32_t* counter, int num_warps)
      : grid_(grid),
        layout_(layout),
        num_control_chunks_(num_control_chunks),
        num_records_(num_records),
        items_(counter) {
    for (int d = 0; d < grid.num_domains; ++d) {
      if (d != grid.domain_idx()) most_chunks_ = max(most_chunks_, num_chunks(layout, num_records[d]));
    }
    first_single_ = max(0, num_numbered() - num_chunks(layout, num_warps));
  }

  // Goes on to the next one. Returns false if there is none.
  __device__ bool next(Record& record) {
    if (record_.index + 1 < record_.end) {
      ++record_.index;
    } else if (!next_part(record_)) {
      return false;
    }
    record = record_;
    return true;
  }

 private:
  // Chunks of all peers, as if each had as many as the peer with the most. They are numbered chunk by chunk, and of one
  // chunk peer by peer.
  __device__ int num_numbered() const { return most_chunks_ * (grid_.num_domains - 1); }

  // Claims a part, and returns its first record. Returns false if there is none.
  __device__ bool next_part(Record& part) {
    const int num_peers = grid_.num_domains - 1, per_chunk = layout_.per_chunk;
    const int num_parts = parts_per_chunk(layout_), first_single_item = first_single_ * num_parts;
    while (true) {
      int item = items_.take();
      const bool is_single = item >= first_single_item;
      if (is_single) item -= first_single_item;
      const int per_number = is_single ? per_chunk : num_parts, rows = is_single ? 1 : kRowsOfPart;
      const int number = (is_single ? first_single_ : 0) + item / per_number;
      if (number >= num_numbered()) return false;
      const int domain = (grid_.domain_idx() + 1 + number % num_peers) % grid_.num_domains;
      const int chunk = number / num_peers, first = chunk * per_chunk;
      const int chunk_end = min(first + per_chunk, num_records_[domain]);
      const int begin = first + item % per_number * rows;
      if (begin >= chunk_end) continue;
      part = {domain, begin, num_control_chunks_ + chunk, begin, min(begin + rows, chunk_end), chunk_end - first};
      return true;
    }
  }

  const Grid& grid_;
  const RecordLayout& layout_;
  const int num_control_chunks_;
  const int* num_records_;
  WorkIndices<> items_;
  int most_chunks_ = 0;
  int first_single_;  // number of the first chunk whose records are claimed one by one
  Record record_{};
};

}  // namespace
}  // namespace hybrid_ep
