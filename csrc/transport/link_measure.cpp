#include "transport/link_measure.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace hybrid_ep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 1000;  // looks without work before a nap
constexpr auto kNap = std::chrono::microseconds(50);

// What a chunk holds instead of rows: who sends it to whom, and when.
uint64_t pattern(int from, int to, uint32_t epoch, int chunk) {
  return (static_cast<uint64_t>(from) << 56 | static_cast<uint64_t>(to) << 48 | static_cast<uint64_t>(epoch) << 24) +
         static_cast<uint64_t>(chunk);
}

struct Peer {
  int idx, num_sent = 0, num_received = 0, num_credits = 0;  // a credit is for one use of one group of slots
};

class Runner {
 public:
  Runner(HostWriter& writer, const ChunkRun& run)
      : writer_(writer), run_(run), ring_(writer.view().layout.rings[run.ring]) {
    const LinkLayout& layout = writer.view().layout;
    for (int peer = 0; peer < layout.num_domains; ++peer) {
      if (layout.joins(peer)) peers_.push_back({peer});
    }
  }

  // One look at every peer. Returns whether anything happened.
  bool step() {
    bool has_worked = false;
    for (Peer& peer : peers_) has_worked |= send(peer) | receive(peer) | take_credit(peer);
    return has_worked;
  }

  bool is_done() const {
    return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
      return peer.num_received == run_.num_in && peer.num_credits == num_groups();
    });
  }

  ChunkFigures figures(double seconds) const {
    ChunkFigures sum{seconds, 0, 0, num_wrong_};
    for (const Peer& peer : peers_) {
      sum.num_sent += peer.num_sent;
      sum.num_received += peer.num_received;
    }
    return sum;
  }

 private:
  int slots() const { return static_cast<int>(ring_.num_slots); }
  int per_credit() const { return static_cast<int>(ring_.slots_per_credit); }
  int num_groups() const { return (run_.num_out + per_credit() - 1) / per_credit(); }
  uint64_t word(int chunk) const { return chunk_word(run_.epoch, static_cast<uint32_t>(chunk / slots()), 1); }

  // Sends a chunk if the receiver has read the chunk that the slot held one lap before.
  bool send(Peer& peer) {
    const int chunk = peer.num_sent;
    if (chunk == run_.num_out) return false;
    if (chunk >= slots() + peer.num_credits * per_credit()) return false;
    uint8_t* slot = writer_.send_slot(run_.ring, peer.idx, chunk % slots());
    if (run_.verifies) fill(slot, pattern(writer_.view().layout.domain_idx, peer.idx, run_.epoch, chunk));
    if (!writer_.push({CommandKind::kPut, run_.ring, peer.idx, chunk % slots(), run_.num_bytes, word(chunk)}))
      return false;
    ++peer.num_sent;
    return true;
  }

  bool receive(Peer& peer) {
    const int chunk = peer.num_received, slot = chunk % slots();
    if (chunk == run_.num_in || writer_.poll(run_.ring, peer.idx, slot) != word(chunk)) return false;
    const bool ends_group = (chunk + 1) % per_credit() == 0 || chunk + 1 == run_.num_in;
    if (run_.verifies && has_credit_due_ != &peer) {
      num_wrong_ += !holds(writer_.recv_slot(run_.ring, peer.idx, slot),
                           pattern(peer.idx, writer_.view().layout.domain_idx, run_.epoch, chunk));
    }
    if (ends_group && !writer_.push({CommandKind::kCredit, run_.ring, peer.idx, slot / per_credit(), 0, word(chunk)})) {
      has_credit_due_ = &peer;  // the FIFO is full: again, without a second look at the chunk
      return false;
    }
    has_credit_due_ = nullptr;
    ++peer.num_received;
    return true;
  }

  bool take_credit(Peer& peer) {
    if (peer.num_credits == num_groups()) return false;
    const int chunk = peer.num_credits * per_credit();
    if (writer_.poll_credit(run_.ring, peer.idx, chunk % slots() / per_credit()) != word(chunk)) return false;
    ++peer.num_credits;
    return true;
  }

  void fill(uint8_t* slot, uint64_t value) const {
    for (uint32_t i = 0; i < run_.num_bytes; i += sizeof(value)) {
      const uint64_t here = value + i;
      std::memcpy(slot + i, &here, sizeof(here));
    }
  }
  bool holds(const uint8_t* slot, uint64_t value) const {
    for (uint32_t i = 0; i < run_.num_bytes; i += sizeof(value)) {
      const uint64_t here = value + i;
      if (std::memcmp(slot + i, &here, sizeof(here)) != 0) return false;
    }
    return true;
  }

  HostWriter& writer_;
  const ChunkRun run_;
  const RingShape ring_;
  std::vector<Peer> peers_;
  const Peer* has_credit_due_ = nullptr;
  uint64_t num_wrong_ = 0;
};

}  // namespace

ChunkFigures run_chunks(HostWriter& writer, const FailureReport& failure, const ChunkRun& run) {
  Runner runner(writer, run);
  const auto begin = Clock::now();
  const auto deadline = begin + std::chrono::duration<double>(run.timeout_s);
  for (int idle = 0; !runner.is_done(); ++idle) {
    if (runner.step()) idle = 0;
    if (failure.has_failed() || Clock::now() > deadline) break;
    // The proxy and the network may need this CPU.
    if (idle > kSpins) std::this_thread::sleep_for(kNap);
  }
  return runner.figures(std::chrono::duration<double>(Clock::now() - begin).count());
}

double median_post_ns(HostWriter& writer, int peer, int num) {
  std::vector<double> times;
  const uint32_t epoch = 0xffffffffu;
  for (int i = 0; i < num; ++i) {
    const auto begin = Clock::now();
    if (!writer.push({CommandKind::kPut, 0, peer, 0, 0, chunk_word(epoch, static_cast<uint32_t>(i), 1)})) break;
    while (writer.num_done() != writer.num_pushed()) {
    }
    times.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count());
  }
  if (times.empty()) return 0;
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

}  // namespace hybrid_ep
