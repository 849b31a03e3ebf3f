#include "transport/fabric_link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "transport/arrivals.h"
#include "transport/fabric_device.h"

namespace hybrid_ep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kReadAtATime = 32;       // completions
constexpr size_t kMaxBacklog = 64;        // words of a NIC that the provider has not taken yet
constexpr int kLookEvery = 64;            // turns between looks at the clock
constexpr int kMaxIdleWaits = 16;         // on descriptors in a row without any work
constexpr long kIdlePollNs = 20'000'000;  // between turns without a call, if no descriptor wakes the thread before
constexpr auto kGoodbye = std::chrono::seconds(1);
constexpr std::string_view kShmPrefix = "fi_shm://";
constexpr int kPeerShift = 22;  // above the bits of an Immediate
constexpr uint64_t kIsAsking = 0, kIsOpen = 1, kIsClosed = 2, kNumStates = 3;

// A range of a peer's memory, as writes name it.
struct RemoteRange {
  uint64_t address, key;
};
struct RemoteMemory {
  fi_addr_t peer;
  RemoteRange window, words, staged;
};

// A write copies `num_bytes` from `memory` to a range of the peer.
struct Piece {
  const void* memory;
  size_t num_bytes;
  fid_mr* region;
  RemoteRange to;
};

// A write of a word: the part of a put, or a credit, and its peer. As completion data the peer is the sender.
struct Tag {
  int peer;
  Immediate what;

  uint64_t pack() const { return static_cast<uint64_t>(peer) << kPeerShift | what.pack(); }
  static Tag unpack(uint64_t bits) {
    return {static_cast<int>(bits >> kPeerShift & 0xff),
            Immediate::unpack(static_cast<uint32_t>(bits) & ((1u << kPeerShift) - 1))};
  }
};
static_assert(kMaxDomains <= 1 << 8 && kPeerShift + 8 <= 32);
// The context of a write: its tag, and a bit that makes it no null pointer.
void* context_of(const Tag& tag) { return reinterpret_cast<void*>(uint64_t{1} << 32 | tag.pack()); }

struct Nic : FabricDevice {
  std::vector<RemoteMemory> remote;  // by domain
  bool takes_two_ranges = false;     // in one write: a chunk and its word
  std::deque<Tag> backlog;           // words that the provider has not taken yet
};

class FabricLink final : public Link {
 public:
  FabricLink(const LinkLayout& layout, const FabricOptions& options)
      : Link(layout),
        options_(options),
        arrivals_(layout),
        staged_(allocate_pinned(sizeof(uint64_t) * (2 * layout.num_words + layout.num_domains + kNumStates))),
        peers_(layout.num_domains) {
    FabricOwner<fi_info> infos = find_fabric(options, options.memory != 0);
    // Only a NIC writes to GPU memory by itself. Other providers would copy, in the thread of the proxy.
    is_gpu_memory_ = options.memory != 0 && infos && infos->nic != nullptr;
    if (!is_gpu_memory_) infos = find_fabric(options, false);
    if (!infos) throw LinkError(-1, "libfabric finds no network for provider " + options.provider + " here");
    const std::vector<std::string> names = options.devices.empty() ? std::vector<std::string>{""} : options.devices;
    for (const std::string& name : names) {
      nics_.push_back({open_fabric_device(infos.get(), name, static_cast<size_t>(layout.num_domains), num_arrivals()),
                       std::vector<RemoteMemory>(layout.num_domains),
                       false,
                       {}});
    }
    if (is_gpu_memory_) is_gpu_memory_ = register_all(reinterpret_cast<uint8_t*>(options.memory), true) == 0;
    if (!is_gpu_memory_) {
      pinned_ = allocate_pinned(layout.window_bytes + sizeof(uint64_t) * layout.num_words);
      check_fabric("memory cannot be registered", register_all(pinned_.get(), false));
    }
    for (Nic& nic : nics_) {
      const fi_tx_attr& limits = *nic.info->tx_attr;
      nic.takes_two_ranges =
          options.has_remote_data && !is_gpu_memory_ && limits.iov_limit >= 2 && limits.rma_iov_limit >= 2;
    }
    set_waiters();
  }

  ~FabricLink() override {
    nics_.clear();  // before the memory that they use
    for (const int file : {epoll_, timer_, ready_}) ::close(file);
  }

  uint8_t* window() const override { return window_; }
  uint64_t* words() const override { return words_; }

  std::string describe() const override {
    std::string text = "libfabric provider " + options_.provider + " on ";
    for (const Nic& nic : nics_) text += (&nic == nics_.data() ? "" : ", ") + nic.name;
    return text + ", rings in " + (is_gpu_memory_ ? "GPU memory" : "pinned host memory") +
           (options_.has_remote_data ? "" : ", words after delivery");
  }

  // The shape, and for each NIC its memory and the bytes of its name.
  std::string address() const override {
    std::ostringstream text;
    text << options_.provider << '\n' << nics_.size() << ' ' << options_.has_remote_data << '\n';
    for (const Nic& nic : nics_) {
      const std::string name = name_of_endpoint(nic);
      const bool is_virtual = (nic.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
      for (const auto& [memory, region] : {std::pair<const void*, fid_mr*>{window_, nic.window.get()},
                                           {words_, nic.words.get()},
                                           {staged_.get(), nic.staged.get()}}) {
        text << (is_virtual ? reinterpret_cast<uintptr_t>(memory) : 0) << ' ' << fi_mr_key(region) << ' ';
      }
      text << name.size() << '\n' << name;
    }
    return text.str();
  }

  // Endpoints connect at the first write. So each rank writes a word to each peer now, and waits for the peer's.
  void connect(const std::vector<std::string>& addresses, double timeout_s) override {
    for_each_peer([&](int peer) { take_address(peer, addresses[peer]); });
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    std::vector<bool> has_knocked(layout().num_domains);
    for (bool is_done = false; !is_done;) {
      is_done = is_quiet();
      for_each_peer([&](int peer) {
        if (!peers_[peer].error.empty()) throw LinkError(peer, peers_[peer].error);
        if (!has_knocked[peer]) has_knocked[peer] = knock(peer, kIsOpen);
        const bool is_there = has_knocked[peer] && state_of(peer) != 0;
        if (!is_there && Clock::now() > deadline) {
          throw LinkError(peer, "libfabric provider " + options_.provider + ": it does not answer in time");
        }
        is_done &= is_there;
      });
      if (const auto found = failure().get()) throw LinkError(found->peer, found->device + ": " + found->detail);
      if (!progress() && !is_done) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    // Every peer has mapped the file of provider shm, so that it needs no name, and no killed rank leaves it behind.
    for (const Nic& nic : nics_) {
      const std::string name = name_of_endpoint(nic);
      if (name.rfind(kShmPrefix, 0) == 0) shm_unlink(name.c_str() + kShmPrefix.size());
    }
  }

  bool post(const Command& command) override {
    const int peer = command.peer, ring = command.ring, slot = command.slot;
    const bool is_put = command.kind == CommandKind::kPut, has_chunk = is_put && command.num_bytes > 0;
    if (state_of(peer) == kIsClosed) {
      if (is_put) fail(peer, nics_[0].name, "the peer has closed its end");
      return true;
    }
    Nic& nic = nic_of(slot);
    if (nic.backlog.size() >= kMaxBacklog) return false;
    const Part part = !is_put ? Part::kCredit : has_chunk ? Part::kWordOfChunk : Part::kWordAlone;
    const Tag word{peer, {part, ring, slot}};
    sent_words()[own_word(word)] = command.word;
    if (has_chunk) {
      const Piece pieces[2] = {chunk_of(nic, word, command.num_bytes), word_of(nic, word)};
      if (nic.takes_two_ranges) return write(nic, {peer, {Part::kWordAlone, ring, slot}}, pieces, 2, FI_REMOTE_CQ_DATA);
      if (!write(nic, {peer, {Part::kChunk, ring, slot}}, pieces, 1,
                 options_.has_remote_data ? FI_REMOTE_CQ_DATA : FI_DELIVERY_COMPLETE)) {
        return false;
      }
      if (!options_.has_remote_data) return true;  // the word follows the completion of the chunk
    }
    send_word(nic, word);
    return true;
  }

  bool progress() override {
    bool has_worked = false;
    for (Nic& nic : nics_) {
      while (!nic.backlog.empty() && write_word(nic, nic.backlog.front())) nic.backlog.pop_front();
      fi_cq_data_entry entries[kReadAtATime];
      const ssize_t num = fi_cq_read(nic.completions.get(), entries, kReadAtATime);
      has_worked |= num > 0 || num == -FI_EAVAIL;
      if (num == -FI_EAVAIL) take_error(nic);
      if (num < 0 && num != -FI_EAVAIL && num != -FI_EAGAIN) {
        fail(-1, name_of(nic), fabric_error("fi_cq_read", num));
      }
      if (num > 0 && options_.has_remote_data && is_gpu_memory_) flush_gpu_direct_writes();
      for (ssize_t i = 0; i < num; ++i) complete(nic, entries[i]);
    }
    if (has_worked) num_idle_waits_ = 0;
    if (++turn_ % kLookEvery == 0) look_for_silent_peers();
    return has_worked;
  }

  bool is_quiet() const override {
    return num_writes_ == 0 &&
           std::all_of(nics_.begin(), nics_.end(), [](const Nic& nic) { return nic.backlog.empty(); });
  }

  // A provider must be told before a thread sleeps on its descriptor, and may have work left. Some have no descriptor,
  // one that stays readable without work, or one that a peer's write does not always make readable. So a clock wakes
  // the thread, too: a peer's write may need it to be complete.
  int wait_fd() const override {
    uint64_t ticks;
    (void)!read(timer_, &ticks, sizeof(ticks));
    if (!has_descriptors_ || ++num_idle_waits_ > kMaxIdleWaits) return timer_;
    for (const Nic& nic : nics_) {
      fid* queue = &nic.completions->fid;
      if (fi_trywait(nic.fabric.get(), &queue, 1) != 0) return ready_;
    }
    return epoll_;
  }

  // An endpoint that is gone lets its peer's writes fail: so each end tells the others that it closes, also after a
  // failure, and waits until they have said so, too.
  void close() override {
    const auto deadline = Clock::now() + kGoodbye;
    is_closing_ = true;
    std::vector<bool> has_knocked(layout().num_domains);
    for (bool is_done = false; !is_done && Clock::now() < deadline;) {
      is_done = true;
      for_each_peer([&](int peer) {
        if (failure().has_lost(peer)) return;
        if (!has_knocked[peer]) has_knocked[peer] = knock(peer, kIsClosed);
        is_done &= has_knocked[peer] && (state_of(peer) == kIsClosed || failure().has_failed());
      });
      is_done &= is_quiet();
      if (!progress() && !is_done) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

 private:
  struct Peer {
    int num_writes = 0;  // not complete
    bool is_refused = false;
    Clock::time_point since;  // the last completion, if a write waits
    std::string error;
  };

  // Pinned words that NICs read and write: those to be sent, those that have come without having been told, and what
  // each peer says of itself; then the values that this rank says.
  uint64_t* sent_words() const { return reinterpret_cast<uint64_t*>(staged_.get()); }
  uint64_t* came_words() const { return sent_words() + layout().num_words; }
  uint64_t* states() const { return came_words() + layout().num_words; }
  uint64_t state_of(int peer) const { return __atomic_load_n(states() + peer, __ATOMIC_ACQUIRE); }
  Nic& nic_of(int slot) { return nics_[static_cast<size_t>(slot) % nics_.size()]; }
  static std::string name_of_endpoint(const Nic& nic) {
    size_t length = 0;
    (void)fi_getname(&nic.endpoint->fid, nullptr, &length);
    std::string name(length, '\0');
    check_fabric("fi_getname", fi_getname(&nic.endpoint->fid, name.data(), &length));
    return name;
  }
  std::string name_of(const Nic& nic) const { return "libfabric " + options_.provider + " on " + nic.name; }

  template <typename Function>
  void for_each_peer(Function&& function) const {
    for (int peer = 0; peer < layout().num_domains; ++peer) {
      if (layout().joins(peer)) function(peer);
    }
  }

  // The index of a word at its receiver, and the place where this rank keeps it until it is sent.
  uint32_t word_at(int owner, int peer, const Immediate& what) const {
    return what.part == Part::kCredit ? layout().credit_idx(owner, what.ring, peer, what.slot)
                                      : layout().flag_idx(owner, what.ring, peer, what.slot);
  }
  uint32_t own_word(const Tag& tag) const { return word_at(layout().domain_idx, tag.peer, tag.what); }

  // Completions that peers can cause before this rank reads one: two for each slot, and one for each credit.
  size_t num_arrivals() const {
    size_t num = 0;
    for (int ring = 0; ring < layout().num_rings; ++ring) {
      num += 2 * layout().rings[ring].num_slots + layout().rings[ring].num_credits();
    }
    return options_.has_remote_data ? num * static_cast<size_t>(layout().num_peers()) : 0;
  }

  // Window and words in `memory`. Where the CPU writes the words of a window in GPU memory, they are pinned.
  int register_all(uint8_t* memory, bool is_gpu_memory) {
    const LinkLayout& at = layout();
    const size_t words_bytes = sizeof(uint64_t) * at.num_words;
    const int gpu = is_gpu_memory ? options_.device : -1;
    const bool has_gpu_words = is_gpu_memory && !options_.has_remote_data;
    window_ = memory;
    if (is_gpu_memory && !has_gpu_words) pinned_ = allocate_pinned(words_bytes);
    words_ = reinterpret_cast<uint64_t*>(is_gpu_memory && !has_gpu_words ? pinned_.get() : memory + at.window_bytes);
    for (Nic& nic : nics_) {
      int status = register_fabric_memory(nic, window_, at.window_bytes, gpu, &nic.window);
      if (status == 0) status = register_fabric_memory(nic, words_, words_bytes, has_gpu_words ? gpu : -1, &nic.words);
      const size_t staged_bytes = sizeof(uint64_t) * (2 * at.num_words + at.num_domains + kNumStates);
      if (status == 0) status = register_fabric_memory(nic, staged_.get(), staged_bytes, -1, &nic.staged);
      if (status != 0) return status;
    }
    return 0;
  }

  void set_waiters() {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    ready_ = eventfd(1, EFD_CLOEXEC);
    const itimerspec period{{0, kIdlePollNs}, {0, kIdlePollNs}};
    if (epoll_ < 0 || ready_ < 0 || timerfd_settime(timer_, 0, &period, nullptr) != 0) {
      throw LinkError(-1, std::string("libfabric: descriptors to wait on: ") + std::strerror(errno));
    }
    epoll_event event{};
    event.events = EPOLLIN;
    (void)epoll_ctl(epoll_, EPOLL_CTL_ADD, timer_, &event);
    for (const Nic& nic : nics_) has_descriptors_ &= epoll_ctl(epoll_, EPOLL_CTL_ADD, nic.descriptor, &event) == 0;
  }

  void take_address(int peer, const std::string& address) {
    std::istringstream text(address);
    std::string provider;
    size_t num_nics = 0;
    bool has_remote_data = false;
    std::getline(text, provider);
    text >> num_nics >> has_remote_data;
    if (provider != options_.provider || num_nics != nics_.size() || has_remote_data != options_.has_remote_data) {
      std::ostringstream what;
      what << "libfabric: it has provider " << provider << " with " << num_nics << " NICs; this rank "
           << options_.provider << " with " << nics_.size() << "; allowed: the same at every rank";
      throw LinkError(peer, what.str());
    }
    for (Nic& nic : nics_) {
      RemoteMemory& memory = nic.remote[peer];
      size_t length = 0;
      for (RemoteRange* range : {&memory.window, &memory.words, &memory.staged}) text >> range->address >> range->key;
      text >> length;
      std::string name(text ? length : 0, '\0');
      text.get();
      text.read(name.data(), static_cast<std::streamsize>(name.size()));
      if (!text) throw LinkError(peer, "libfabric: its address is not of this transport");
      if (fi_av_insert(nic.peers.get(), name.data(), 1, &memory.peer, 0, nullptr) != 1) {
        throw LinkError(peer, name_of(nic) + ": fi_av_insert does not take its address");
      }
    }
  }

  // Writes a state of this rank where the peer looks for it, or where nobody looks. Returns whether the provider has
  // taken the write. It is complete when it is at the peer.
  bool knock(int peer, uint64_t state) {
    Nic& nic = nics_[0];
    const uint64_t place = state == kIsAsking ? layout().num_domains : layout().domain_idx;
    const RemoteRange& to = nic.remote[peer].staged;
    uint64_t* value = states() + layout().num_domains + state;
    *value = state;
    const Piece piece{value,
                      sizeof(*value),
                      nic.staged.get(),
                      {to.address + sizeof(uint64_t) * (2 * layout().num_words + place), to.key}};
    return write(nic, {peer, {Part::kWordAlone, 0, 0}}, &piece, 1, FI_DELIVERY_COMPLETE);
  }

  // Sends a word now, or after those that wait.
  void send_word(Nic& nic, const Tag& tag) {
    if (!nic.backlog.empty() || !write_word(nic, tag)) nic.backlog.push_back(tag);
  }

  bool write_word(Nic& nic, const Tag& tag) {
    const Piece piece = word_of(nic, tag);
    return write(nic, tag, &piece, 1, options_.has_remote_data ? FI_REMOTE_CQ_DATA : 0);
  }

  Piece chunk_of(const Nic& nic, const Tag& tag, size_t num_bytes) const {
    const LinkLayout& at = layout();
    const RemoteRange& to = nic.remote[tag.peer].window;
    const Immediate& what = tag.what;
    return {window_ + at.send_offset(at.domain_idx, what.ring, tag.peer, what.slot),
            num_bytes,
            nic.window.get(),
            {to.address + at.recv_offset(tag.peer, what.ring, at.domain_idx, what.slot), to.key}};
  }

  // A word that is told goes where only the receiver's CPU reads it. Otherwise the NIC writes it to its place.
  Piece word_of(const Nic& nic, const Tag& tag) const {
    const bool is_told = options_.has_remote_data;
    const RemoteRange& to = is_told ? nic.remote[tag.peer].staged : nic.remote[tag.peer].words;
    const uint64_t idx = word_at(tag.peer, layout().domain_idx, tag.what) + (is_told ? layout().num_words : 0);
    return {sent_words() + own_word(tag),
            sizeof(uint64_t),
            nic.staged.get(),
            {to.address + sizeof(uint64_t) * idx, to.key}};
  }

  // Begins a write. Returns false if the provider has no room for it now.
  bool write(Nic& nic, const Tag& tag, const Piece* pieces, size_t num, uint64_t flags) {
    Peer& peer = peers_[tag.peer];
    if (failure().has_lost(tag.peer)) return true;
    iovec parts[2];
    fi_rma_iov targets[2];
    void* descriptors[2];
    for (size_t i = 0; i < num; ++i) {
      parts[i] = {const_cast<void*>(pieces[i].memory), pieces[i].num_bytes};
      targets[i] = {pieces[i].to.address, pieces[i].num_bytes, pieces[i].to.key};
      descriptors[i] = fi_mr_desc(pieces[i].region);
    }
    fi_msg_rma message{};
    message.msg_iov = parts;
    message.desc = descriptors;
    message.iov_count = num;
    message.addr = nic.remote[tag.peer].peer;
    message.rma_iov = targets;
    message.rma_iov_count = num;
    message.context = context_of(tag);
    message.data = Tag{layout().domain_idx, tag.what}.pack();
    const ssize_t status = fi_writemsg(nic.endpoint.get(), &message, flags | FI_COMPLETION);
    if (status == 0 || status == -FI_EAGAIN) {
      if (peer.num_writes == 0 && !peer.is_refused) peer.since = Clock::now();
      peer.is_refused = status != 0;
      peer.num_writes += status == 0;
      num_writes_ += status == 0;
      return status == 0;
    }
    lose(tag.peer, nic, fabric_error("fi_writemsg", status));
    return true;
  }

  void complete(Nic& nic, const fi_cq_data_entry& entry) {
    if ((entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA)) == 0) {
      settle(nic, entry.op_context, true);
      return;
    }
    const Tag tag = Tag::unpack(entry.data);
    const int64_t word = layout().joins(tag.peer) ? arrivals_.take(tag.peer, tag.what) : -2;
    if (word == -2) fail(-1, name_of(nic), "a peer has sent what does not fit the link's layout");
    if (word >= 0) __atomic_store_n(words_ + word, came_words()[word], __ATOMIC_RELEASE);
  }

  // Counts a write as ended.
  void settle(Nic& nic, const void* context, bool is_delivered) {
    if (context == nullptr) return;
    Tag tag = Tag::unpack(reinterpret_cast<uint64_t>(context));
    Peer& peer = peers_[tag.peer];
    if (peer.num_writes == 0) return;  // of a peer that is gone
    --peer.num_writes;
    --num_writes_;
    peer.since = Clock::now();
    if (is_delivered && tag.what.part == Part::kChunk && !options_.has_remote_data) {
      tag.what.part = Part::kWordOfChunk;
      send_word(nic, tag);
    }
  }

  void take_error(Nic& nic) {
    fi_cq_err_entry error{};
    if (fi_cq_readerr(nic.completions.get(), &error, 0) < 1) return;
    settle(nic, error.op_context, false);
    const int peer = error.op_context == nullptr ? -1 : Tag::unpack(reinterpret_cast<uint64_t>(error.op_context)).peer;
    if (is_closing_ || (peer >= 0 && state_of(peer) == kIsClosed)) return;
    char text[256] = "";
    const char* said = fi_cq_strerror(nic.completions.get(), error.prov_errno, error.err_data, text, sizeof(text));
    const std::string detail = std::string(fabric_api().strerror(error.err)) + " (error " + std::to_string(error.err) +
                               ", provider's " + std::to_string(error.prov_errno) + ": " +
                               (said != nullptr ? said : "") + ")";
    if (peer >= 0) {
      lose(peer, nic, detail);
    } else {
      fail(-1, name_of(nic), detail);
    }
  }

  // Waits no more for what was sent to a peer that is gone.
  void forget_writes(int peer) {
    num_writes_ -= peers_[peer].num_writes;
    peers_[peer].num_writes = 0;
    peers_[peer].is_refused = false;
  }

  void lose(int peer, const Nic& nic, const std::string& detail) {
    Peer& lost = peers_[peer];
    forget_writes(peer);
    if (lost.error.empty()) lost.error = name_of(nic) + ": " + detail;
    fail(peer, name_of(nic), detail);
  }

  // A provider may retry without end, and says nothing of a peer to which nothing is sent. So each peer is asked from
  // time to time, and the one whose writes have waited longest is lost when half of the timeout is over.
  void look_for_silent_peers() {
    const Clock::time_point now = Clock::now();
    const std::chrono::duration<double> limit(options_.timeout_s / 2);
    if (now >= next_asking_ && !is_closing_) {
      next_asking_ = now + std::chrono::duration_cast<Clock::duration>(limit / 4);
      for_each_peer([&](int peer) {
        if (peers_[peer].num_writes == 0 && state_of(peer) == kIsOpen) knock(peer, kIsAsking);
      });
    }
    int silent = -1;
    for_each_peer([&](int peer) {
      if (state_of(peer) == kIsClosed) forget_writes(peer);
      const bool waits = peers_[peer].num_writes > 0 || peers_[peer].is_refused;
      if (waits && (silent < 0 || peers_[peer].since < peers_[silent].since)) silent = peer;
    });
    if (silent < 0 || now - peers_[silent].since < limit) return;
    std::ostringstream what;
    what << "no write has completed for " << limit.count() << " s";
    lose(silent, nics_[0], what.str());
  }

  const FabricOptions options_;
  Arrivals arrivals_;
  Memory staged_, pinned_;
  uint8_t* window_ = nullptr;
  uint64_t* words_ = nullptr;
  bool is_gpu_memory_ = false, is_closing_ = false, has_descriptors_ = true;
  mutable int num_idle_waits_ = 0;  // without work in between
  std::vector<Nic> nics_;
  std::vector<Peer> peers_;  // by domain
  int64_t num_writes_ = 0;   // not complete
  uint64_t turn_ = 0;
  Clock::time_point next_asking_;
  int epoll_ = -1, timer_ = -1, ready_ = -1;
};

}  // namespace

const bool kHasFabric = true;

std::unique_ptr<Link> make_fabric_link(const LinkLayout& layout, const FabricOptions& options) {
  return std::make_unique<FabricLink>(layout, options);
}

}  // namespace hybrid_ep
