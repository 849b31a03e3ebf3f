// Offsets of parts that stand one after the other in memory, each aligned alike.
#pragma once

#include <cstdint>

namespace hybrid_ep {

class Offsets {
 public:
  explicit Offsets(int64_t align = 1, int64_t begin = 0) : align_(align), end_(begin) {}

  // The offset of the next part, which has `size` bytes or words.
  int64_t append(int64_t size) {
    const int64_t begin = end_;
    end_ += (size + align_ - 1) / align_ * align_;
    return begin;
  }
  int64_t end() const { return end_; }

 private:
  int64_t align_, end_;
};

}  // namespace hybrid_ep
