#include "transport/proxy.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "common/check.h"

namespace hybrid_ep {
namespace {

constexpr uint32_t kCommandsPerTurn = 32;  // of a FIFO, before the next one has its turn
constexpr int kSpins = 256;                // sweeps without work before the thread yields its CPU
// In an open call: after kLazyAfterNs without work the thread sleeps, for 1 / kLazyPart of the time without work.
constexpr int64_t kLazyAfterNs = 1'000'000, kMaxLazySleepNs = 1'000'000;
constexpr int64_t kLazyPart = 16;
constexpr auto kDrainPause = std::chrono::microseconds(50);

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void pin_thread(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  // Best effort: a container may allow other CPUs than the topology names.
  (void)pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

}  // namespace

Proxy::Proxy(std::unique_ptr<Link> link, const ProxyOptions& options)
    : pid_(getpid()), link_(std::move(link)), options_(options) {
  const int num = options.num_fifos;
  require(num >= 1 && num <= kMaxFifos, "num_fifos", num, "1 to 64");
  for (const int cpu : options.cpus) require(cpu >= 0 && cpu < CPU_SETSIZE, "cpus", cpu, "0 to 1023");
  const size_t command_bytes = sizeof(PackedCommand) * kFifoSlots * num, cursor_bytes = sizeof(FifoCursor) * num;
  pinned_ = allocate_pinned(command_bytes + cursor_bytes);
  cursors_ = allocate_device(2 * cursor_bytes + sizeof(uint64_t));
  fifos_.commands = reinterpret_cast<PackedCommand*>(pinned_.get());
  fifos_.done = reinterpret_cast<FifoCursor*>(pinned_.get() + command_bytes);
  fifos_.heads = reinterpret_cast<FifoCursor*>(cursors_.get());
  fifos_.known_done = fifos_.heads + num;
  fifos_.num_fifos = num;
  for (int i = 0; i < num; ++i) readers_.emplace_back(fifos_, i);
  doorbell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (doorbell_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Proxy::~Proxy() {
  if (getpid() == pid_) {
    close(0);
  } else {
    if (thread_.joinable()) thread_.detach();  // there is no such thread in a forked child,
    (void)link_.release();                     // and what the link holds is the parent's
    (void)pinned_.release();
    (void)cursors_.release();
  }
  ::close(doorbell_);
}

std::string Proxy::address() const {
  require_own_process();
  return link_->address();
}

void Proxy::connect(const std::vector<std::string>& addresses, double timeout_s) {
  require_own_process();
  if (thread_.joinable() || stops_) throw std::logic_error("a proxy is connected once");
  require(addresses.size() == static_cast<size_t>(link_->layout().num_domains), "number of addresses", addresses.size(),
          "one for each domain");
  link_->connect(addresses, timeout_s);
  thread_ = std::thread([this] { run(); });
}

LinkView Proxy::view() const {
  require_own_process();
  LinkView view{link_->layout(), link_->window(), link_->words(), link_->failure().flag(), fifos_, false, {}, {}, 0,
                nullptr};
  const std::vector<uint8_t*> windows = link_->mapped_windows();
  view.is_mapped = !windows.empty();
  if (const double rate = link_->gbytes_per_s(); rate > 0) view.ns_per_byte = static_cast<float>(1 / rate);
  view.crossed_at = reinterpret_cast<uint64_t*>(fifos_.known_done + fifos_.num_fifos);
  std::copy(windows.begin(), windows.end(), view.windows);
  const std::vector<int> pes = link_->pes();
  std::copy(pes.begin(), pes.end(), view.pes);
  return view;
}

void Proxy::begin_call() {
  require_own_process();
  opened_.fetch_add(1);
  if (is_asleep_) wake();
}

void Proxy::begin_call_of(void* proxy) noexcept {
  auto* self = static_cast<Proxy*>(proxy);
  self->opened_.fetch_add(1);
  if (self->is_asleep_) self->wake();
}

void Proxy::take_back_call() {
  require_own_process();
  opened_.fetch_sub(1);
}

void Proxy::keep_other_peers() {
  require_own_process();
  link_->failure().keep_other_peers();
}

std::optional<LinkFailure> Proxy::failure() const {
  require_own_process();
  return link_->failure().get();
}

ProxyCounts Proxy::counts() const { return {puts_, credits_, calls_, bytes_, sleeps_}; }

bool Proxy::drain(double timeout_s) const {
  require_own_process();
  const int64_t deadline_ns = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
  while (drained_ != opened_) {
    if (link_->failure().has_failed() || now_ns() > deadline_ns) return false;
    std::this_thread::sleep_for(kDrainPause);
  }
  return !link_->failure().has_failed();
}

bool Proxy::close(double timeout_s) {
  require_own_process();
  if (thread_.joinable()) {
    stop_deadline_ns_ = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
    stops_ = true;
    wake();
    thread_.join();
  }
  stops_ = true;
  return is_complete_;
}

void Proxy::require_own_process() const {
  if (getpid() != pid_) {
    throw std::logic_error("this process was forked from the one that made the transport, and has no proxy thread");
  }
}

void Proxy::run() {
  pthread_setname_np(pthread_self(), "hybrid_ep_proxy");
  pin_thread(options_.cpus);
  use_device(options_.device);
  int64_t last_work_ns = now_ns();
  for (int idle = 0;;) {
    const bool stops = stops_;  // read first: then the sweep sees all commands that were given before close()
    if (sweep()) {
      idle = 0;
      continue;
    }
    const bool is_idle = link_->is_quiet() || link_->failure().has_failed();
    if (is_idle && drained_.load(std::memory_order_relaxed) != ended_) drained_ = ended_;
    if (stops && (is_idle || now_ns() > stop_deadline_ns_)) {
      is_complete_ = is_idle && !link_->failure().has_failed();
      break;
    }
    if (++idle == 1) last_work_ns = now_ns();
    if (idle < kSpins) {
      pause_cpu();
    } else if (is_idle && opened_ == ended_) {
      sleep(-1);
      idle = 0;
    } else if (const int64_t idle_ns = now_ns() - last_work_ns; idle_ns > kLazyAfterNs) {
      sleep(std::min(idle_ns / kLazyPart, kMaxLazySleepNs));
    } else {
      sched_yield();
    }
  }
  link_->close();
}

// One turn of every FIFO and of the link. Returns whether there was work.
bool Proxy::sweep() {
  bool has_worked = false;
  for (FifoReader& reader : readers_) {
    Command command;
    while (reader.num_unpublished() < kCommandsPerTurn && reader.peek(&command) && carry_out(command)) {
      reader.take();
      has_worked = true;
    }
    reader.publish();
  }
  return link_->progress() || has_worked;
}

bool Proxy::carry_out(const Command& command) {
  const auto add = [](std::atomic<uint64_t>& count, uint64_t value) {  // one writer
    count.store(count.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  };
  if (command.kind == CommandKind::kEnd) {
    ++ended_;
    add(calls_, 1);
    return true;
  }
  if (!link_->failure().has_failed()) {
    if (!fits(link_->layout(), command)) {
      link_->failure().report({-1, "proxy",
                               "a command does not fit the link's layout: ring " + std::to_string(command.ring) +
                                   ", peer " + std::to_string(command.peer) + ", slot " + std::to_string(command.slot) +
                                   ", " + std::to_string(command.num_bytes) + " bytes"});
    } else if (!link_->failure().has_lost(command.peer) && !link_->post(command)) {
      return false;
    }
  }
  const bool is_put = command.kind == CommandKind::kPut;
  add(is_put ? puts_ : credits_, 1);
  if (is_put) add(bytes_, command.num_bytes);
  return true;
}

// Sleeps at most so long; with −1, until something wakes the proxy.
void Proxy::sleep(int64_t timeout_ns) {
  is_asleep_ = true;
  if (timeout_ns >= 0 || opened_ == ended_) {
    if (timeout_ns < 0) sleeps_.store(sleeps_ + 1);
    const timespec timeout{0, std::max<int64_t>(timeout_ns, 0)};
    pollfd wakers[2] = {{doorbell_, POLLIN, 0}, {link_->wait_fd(), POLLIN, 0}};  // poll ignores −1
    if (!stops_) ppoll(wakers, 2, timeout_ns < 0 ? nullptr : &timeout, nullptr);
    uint64_t rings;
    (void)!read(doorbell_, &rings, sizeof(rings));
  }
  is_asleep_ = false;
}

void Proxy::wake() {
  const uint64_t one = 1;
  (void)!write(doorbell_, &one, sizeof(one));
}

}  // namespace hybrid_ep
