#include "transport/faulty_link.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "common/check.h"
#include "transport/forwarding_link.h"

namespace hybrid_ep {
namespace {

using Clock = std::chrono::steady_clock;

class FaultyLink final : public ForwardingLink {
 public:
  FaultyLink(std::unique_ptr<Link> link, const Faults& faults)
      : ForwardingLink(std::move(link)), faults_(faults), random_(faults.seed) {
    require(faults.max_delay_us >= 0, "max_delay_us", faults.max_delay_us, "0 and more");
    require(faults.lost_fraction >= 0 && faults.lost_fraction <= 1, "lost_fraction", faults.lost_fraction, "0 to 1");
  }

  std::string describe() const override { return ForwardingLink::describe() + ", with faults"; }

  bool post(const Command& command) override {
    if (command.kind == CommandKind::kPut && draw() < faults_.lost_fraction) return true;
    const auto delay = std::chrono::duration<double, std::micro>(draw() * faults_.max_delay_us);
    late_.push_back({Clock::now() + std::chrono::duration_cast<Clock::duration>(delay), command});
    return true;
  }

  // Chunks are read only now: a slot that was written again too early sends the wrong rows.
  bool progress() override {
    bool has_worked = false;
    const auto now = Clock::now();
    for (size_t i = 0; i < late_.size();) {
      if (late_[i].due > now || !ForwardingLink::post(late_[i].command)) {
        ++i;
        continue;
      }
      late_[i] = late_.back();
      late_.pop_back();
      has_worked = true;
    }
    return ForwardingLink::progress() || has_worked;
  }

  bool is_quiet() const override { return late_.empty() && ForwardingLink::is_quiet(); }

 private:
  struct Late {
    Clock::time_point due;
    Command command;
  };
  double draw() { return std::uniform_real_distribution<double>()(random_); }

  const Faults faults_;
  std::mt19937_64 random_;
  std::vector<Late> late_;
};

}  // namespace

std::unique_ptr<Link> make_faulty_link(std::unique_ptr<Link> link, const Faults& faults) {
  return std::make_unique<FaultyLink>(std::move(link), faults);
}

}  // namespace hybrid_ep
