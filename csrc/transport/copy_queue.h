// Copies within one host, for the loopback transport: memory_cuda's sibling pair copy_queue_cuda.cpp (copy engines, in
// batches) and copy_queue_host.cpp (memcpy).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hybrid_ep {

class CopyQueue {
 public:
  virtual ~CopyQueue() = default;

  // Copies, then writes the word where all bytes are visible to whoever acquires it; with 0 bytes the word alone.
  // Returns false where there is no room now.
  virtual bool copy(uint8_t* to, const uint8_t* from, size_t num_bytes, uint64_t* word_at, uint64_t word) = 0;
  // Begins what was gathered and looks what has ended. Returns whether anything happened. Throws std::runtime_error.
  virtual bool progress() = 0;
  virtual bool is_quiet() const = 0;
  virtual std::string describe() const = 0;
};

// On the calling thread's current GPU.
std::unique_ptr<CopyQueue> make_copy_queue();

}  // namespace hybrid_ep
