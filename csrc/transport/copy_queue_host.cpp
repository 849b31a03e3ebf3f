#include <cstring>

#include "transport/copy_queue.h"

namespace hybrid_ep {
namespace {

class HostCopyQueue final : public CopyQueue {
 public:
  bool copy(uint8_t* to, const uint8_t* from, size_t num_bytes, uint64_t* word_at, uint64_t word) override {
    if (num_bytes > 0) std::memcpy(to, from, num_bytes);
    __atomic_store_n(word_at, word, __ATOMIC_RELEASE);
    return true;
  }
  bool progress() override { return false; }
  bool is_quiet() const override { return true; }
  std::string describe() const override { return "memcpy"; }
};

}  // namespace

std::unique_ptr<CopyQueue> make_copy_queue() { return std::make_unique<HostCopyQueue>(); }

}  // namespace hybrid_ep
