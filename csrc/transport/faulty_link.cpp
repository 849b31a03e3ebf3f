#include "transport/faulty_link.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "common/check.h"

namespace hybrid_ep {
namespace {

using Clock = std::chrono::steady_clock;

class FaultyLink final : public Link {
 public:
  FaultyLink(std::unique_ptr<Link> link, const Faults& faults)
      : Link(link->layout()), link_(std::move(link)), faults_(faults), random_(faults.seed) {
    require(faults.max_delay_us >= 0, "max_delay_us", faults.max_delay_us, "0 and more");
    require(faults.lost_fraction >= 0 && faults.lost_fraction <= 1, "lost_fraction", faults.lost_fraction, "0 to 1");
  }

  FailureReport& failure() override { return link_->failure(); }
  uint8_t* window() const override { return link_->window(); }
  uint64_t* words() const override { return link_->words(); }
  std::string describe() const override { return link_->describe() + ", with faults"; }
  std::string address() const override { return link_->address(); }
  void connect(const std::vector<std::string>& addresses, double timeout_s) override {
    link_->connect(addresses, timeout_s);
  }

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
      if (late_[i].due > now || !link_->post(late_[i].command)) {
        ++i;
        continue;
      }
      late_[i] = late_.back();
      late_.pop_back();
      has_worked = true;
    }
    return link_->progress() || has_worked;
  }

  bool is_quiet() const override { return late_.empty() && link_->is_quiet(); }
  int wait_fd() const override { return link_->wait_fd(); }
  void close() override { link_->close(); }

 private:
  struct Late {
    Clock::time_point due;
    Command command;
  };
  double draw() { return std::uniform_real_distribution<double>()(random_); }

  std::unique_ptr<Link> link_;
  const Faults faults_;
  std::mt19937_64 random_;
  std::vector<Late> late_;
};

}  // namespace

std::unique_ptr<Link> make_faulty_link(std::unique_ptr<Link> link, const Faults& faults) {
  return std::make_unique<FaultyLink>(std::move(link), faults);
}

}  // namespace hybrid_ep
