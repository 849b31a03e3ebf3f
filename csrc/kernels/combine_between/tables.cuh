// What all warps of a combine between domains know: row offsets, streams, and the flags of runs of partial rows.
// Legend: R ranks, D domains, G ranks of a domain.
#pragma once

#include "kernels/between/chunk_stream.cuh"
#include "kernels/between/records.cuh"
#include "kernels/combine/send_runs.cuh"

namespace hybrid_ep {
namespace {

constexpr int kControlChunks = 1;  // of a call, ahead of its records

// Row offsets of a combine, which every rank computes from the counts of the dispatch.
struct CombineTables {
  int* send_begin;  // [R] first row of x that belongs to each source
  int* send_base;   // [R] where it goes in the arena of the rank that sums for the source
  int* recv_base;   // [D, G] first row, in this rank's arena, of each rank for its peer in each domain; own rows in x
  int* held_begin;  // [D] where the records of each domain begin in what the route holds
};

// What the warps of a CTA know of the streams to and from each domain, in shared memory.
struct Streams {
  FirstPlaces first;
  int num_records[kMaxDomains];  // that go to each domain; to the own one the tokens that have rows in it
  // The first chunks of the call, of which a sending warp knows that they are free.
  int num_free[kSendWarps][kMaxDomains];

  // Collective over the CTA; a barrier must follow.
  __device__ void load(const CombineBetweenParams& params) {
    first.load(params.between);
    for (int d = threadIdx.x; d < params.between.grid.num_domains; d += blockDim.x) {
      const bool is_own = d == params.between.grid.domain_idx();
      num_records[d] = params.route[(is_own ? params.parts.domain_counts : params.parts.num_records) + d];
      for (int warp = 0; warp < kSendWarps; ++warp) num_free[warp][d] = 0;
    }
  }
};

__device__ int count_of(const CombineBetweenParams& params, int source, int domain_rank) {
  return params
      .route[params.parts.counts + static_cast<int64_t>(source) * params.between.grid.ranks_per_domain + domain_rank];
}

// Partial rows are pushed in runs of the rows of one source. Every run has a flag at the rank that sums.

constexpr int kMinRunRows = 8;

// Rows of a run: more than kMinRunRows only where the flags would not suffice. The same at all ranks of a domain.
__device__ int rows_per_run(const CombineBetweenParams& params) {
  int run_rows = kMinRunRows;
  while (params.slot.capacity / run_rows + params.between.grid.num_ranks() > kMaxRanks * kMaxChunksOfSource) {
    run_rows *= 2;
  }
  return run_rows;
}

__device__ uint32_t* run_flags(ControlBlock& control) { return &control.chunk_epoch[0][0]; }

// The flag of the first run that rank r of a domain pushes for a source in domain d. `begin` is where its rows begin in
// the arena, which holds the rows of rank 0 for all domains, then those of rank 1. Each (r, d) may end with a run that
// is not full.
__device__ int first_flag(const CombineBetweenParams& params, int run_rows, int d, int r, int begin) {
  return begin / run_rows + r * params.between.grid.num_domains + d;
}

}  // namespace
}  // namespace hybrid_ep
