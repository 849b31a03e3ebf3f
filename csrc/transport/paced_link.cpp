#include "transport/paced_link.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <sstream>

#include "common/check.h"
#include "transport/forwarding_link.h"

namespace hybrid_ep {
namespace {

using Clock = std::chrono::steady_clock;

class PacedLink final : public ForwardingLink {
 public:
  PacedLink(std::unique_ptr<Link> link, double gbytes_per_s)
      : ForwardingLink(std::move(link)), gbytes_per_s_(gbytes_per_s) {
    require(gbytes_per_s > 0, "gbytes_per_s", gbytes_per_s, "above 0");
  }

  std::string describe() const override { return ForwardingLink::describe() + with_rate(gbytes_per_s_); }

  bool post(const Command& command) override {
    if (command.kind != CommandKind::kPut) return ForwardingLink::post(command);
    const std::chrono::duration<double, std::nano> crossing(command.num_bytes / gbytes_per_s_);
    is_free_at_ = std::max(is_free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(crossing);
    crossing_.push_back({is_free_at_, command});
    return true;
  }

  bool progress() override {
    bool has_worked = false;
    for (const auto now = Clock::now(); !crossing_.empty() && crossing_.front().end <= now; crossing_.pop_front()) {
      if (!ForwardingLink::post(crossing_.front().command)) break;
      has_worked = true;
    }
    return ForwardingLink::progress() || has_worked;
  }

  bool is_quiet() const override { return crossing_.empty() && ForwardingLink::is_quiet(); }

 private:
  struct Crossing {
    Clock::time_point end;
    Command command;
  };

  const double gbytes_per_s_;
  Clock::time_point is_free_at_;
  std::deque<Crossing> crossing_;
};

}  // namespace

std::string with_rate(double gbytes_per_s) {
  if (gbytes_per_s == 0) return "";
  std::ostringstream text;
  text << ", at " << gbytes_per_s << " GB/s";
  return text.str();
}

std::unique_ptr<Link> make_paced_link(std::unique_ptr<Link> link, double gbytes_per_s) {
  return std::make_unique<PacedLink>(std::move(link), gbytes_per_s);
}

}  // namespace hybrid_ep
