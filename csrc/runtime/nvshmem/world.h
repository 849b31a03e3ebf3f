// NVSHMEM in this process: its world, the symmetric heap, and whether puts are complete.
//
// There is one world for each process. Whoever joins second, as torch's NVSHMEM backend may, finds the world that is
// there, so it has to have the same ranks. It is never left: NVSHMEM's finalize waits for every rank, without a
// deadline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybrid_ep {

class NvshmemError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An id of a new world, which one rank makes and all others join.
std::string nvshmem_unique_id();

// Joins the world, or finds the one that this process has joined. Collective over all its ranks, without a deadline.
// Throws NvshmemError if NVSHMEM cannot start, or if the process has another place in a world than `rank` of
// `num_ranks`.
void join_nvshmem(int rank, int num_ranks, const std::string& unique_id, int device);

// Memory of zeros on the symmetric heap, which is never freed. Collective over the world, without a deadline. Throws
// NvshmemError if there is not so much memory.
uint8_t* allocate_symmetric(size_t num_bytes, int device);

// Returns for each of these PEs where this process maps that PE's copy of `memory`, an address of the symmetric heap;
// nullptr if it does not map it.
std::vector<uint8_t*> map_peers(uint8_t* memory, const std::vector<int>& pes);

// Writes zeros, and returns when they are written.
void clear_symmetric(uint8_t* memory, size_t num_bytes, int device);

// Waits until all puts of this rank's kernels are complete at their peers. Kernels must have ended. Returns false after
// timeout_s; NVSHMEM then goes on waiting.
bool quiet_nvshmem(int device, double timeout_s);

}  // namespace hybrid_ep
