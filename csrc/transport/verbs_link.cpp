#include "transport/verbs_link.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <thread>

#include "common/check.h"
#include "transport/arrivals.h"
#include "transport/verbs_device.h"

namespace hybrid_ep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxSends = 256;                              // work requests of a queue pair that are not complete
constexpr int kPollAtATime = 32;                            // completions
constexpr int kLookEvery = 64;                              // turns between looks at the clock
constexpr auto kLookPause = std::chrono::milliseconds(10);  // between looks for events, which are rare
constexpr int kMaxFlowLabel = (1 << 14) - 1;                // labels up to it give different UDP ports
constexpr uint32_t kFirstPacket = 0;                        // sequence number
constexpr auto kGoodbye = std::chrono::seconds(1);

// The addresses of a peer's memory, through one of its NICs.
struct RemoteMemory {
  uint64_t window, words, staged;
  uint32_t window_key, words_key, staged_key;
};

struct QueuePair {
  VerbsOwner<ibv_qp> pair;
  size_t device;
  RemoteMemory remote;
  int num_sends = 0;  // not complete
};

std::string to_hex(const ibv_gid& gid) {
  std::string text(2 * sizeof(gid.raw), '0');
  for (size_t i = 0; i < sizeof(gid.raw); ++i) std::snprintf(&text[2 * i], 3, "%02x", gid.raw[i]);
  return text;
}

ibv_gid from_hex(const std::string& text) {
  ibv_gid gid{};
  for (size_t i = 0; i < sizeof(gid.raw) && 2 * i + 1 < text.size(); ++i) {
    gid.raw[i] = static_cast<uint8_t>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
  }
  return gid;
}

ibv_mtu mtu_of(int bytes) {
  for (int mtu = IBV_MTU_4096; mtu >= IBV_MTU_256; --mtu) {
    if (bytes >= 128 << mtu) return static_cast<ibv_mtu>(mtu);
  }
  return IBV_MTU_256;
}

void check_options(const VerbsOptions& options) {
  require(!options.devices.empty(), "number of devices", options.devices.size(), "1 and more");
  require(options.num_queue_pairs >= 1 && options.num_queue_pairs <= 4, "queue pairs per peer", options.num_queue_pairs,
          "1 to 4");
  require(options.service_level >= 0 && options.service_level < 16, "service level", options.service_level, "0 to 15");
  require(options.traffic_class >= 0 && options.traffic_class < 256, "traffic class", options.traffic_class,
          "0 to 255");
  const int mtu = options.mtu_bytes;
  require(mtu == 0 || (mtu >= 256 && mtu <= 4096 && (mtu & (mtu - 1)) == 0), "MTU", mtu,
          "0, 256, 512, 1024, 2048 or 4096");
  require(!options.window_only || options.memory != 0, "memory of a window alone", options.memory, "an address");
}

class VerbsLink final : public Link {
 public:
  VerbsLink(const LinkLayout& layout, const VerbsOptions& options)
      : Link(layout), options_(options), arrivals_(layout), staged_(allocate_pinned(staged_bytes())) {
    check_options(options);
    num_pairs_ = static_cast<int>(options.devices.size()) * options.num_queue_pairs;
    const int num_peers = layout.num_peers();
    const int per_pair = kMaxSends + (options.unordered ? num_receives() : 0);
    for (const std::string& name : options.devices) {
      devices_.push_back(open_verbs_device(name, options, num_peers * options.num_queue_pairs * per_pair));
    }
    register_all();
    for (int peer = 0; peer < layout.num_domains; ++peer) {
      pairs_.emplace_back();
      for (int i = 0; i < num_pairs_ && layout.joins(peer); ++i) pairs_[peer].push_back(make_pair(i));
    }
  }

  ~VerbsLink() override {
    pairs_.clear();  // before what they use
  }

  uint8_t* window() const override { return window_; }
  uint64_t* words() const override { return words_; }

  std::string describe() const override {
    std::ostringstream text;
    text << "verbs on ";
    for (const VerbsDevice& device : devices_) {
      text << (&device == devices_.data() ? "" : ", ") << device.name << " (GID " << device.gid_index << ")";
    }
    text << ", " << num_pairs_ << " queue pairs a peer, rings in " << memory_kind_;
    if (options_.unordered) text << ", unordered";
    return text.str();
  }

  // The shape, one line for each NIC, and the numbers of the queue pairs, by domain.
  std::string address() const override {
    std::ostringstream text;
    text << devices_.size() << ' ' << options_.num_queue_pairs << ' ' << options_.unordered << '\n';
    for (const VerbsDevice& device : devices_) {
      text << to_hex(device.gid) << ' ' << device.port.lid << ' ' << device.port.active_mtu << ' '
           << reinterpret_cast<uintptr_t>(window_) << ' ' << reinterpret_cast<uintptr_t>(words_) << ' '
           << reinterpret_cast<uintptr_t>(staged_.get()) << ' ' << device.window->rkey << ' ' << device.words->rkey
           << ' ' << device.staged->rkey << ' ' << device.partitions.size();
      for (const Partition& partition : device.partitions) text << ' ' << partition.key;
      text << '\n';
    }
    for (const auto& of_peer : pairs_) {
      for (int i = 0; i < num_pairs_; ++i) text << (of_peer.empty() ? 0 : of_peer[i].pair->qp_num) << ' ';
    }
    return text.str();
  }

  void connect(const std::vector<std::string>& addresses, double) override {
    for (int peer = 0; peer < layout().num_domains; ++peer) {
      if (layout().joins(peer)) connect_to(peer, addresses[peer]);
    }
  }

  bool post(const Command& command) override {
    const LinkLayout& at = layout();
    const int me = at.domain_idx, peer = command.peer, ring = command.ring, slot = command.slot;
    const bool is_put = command.kind == CommandKind::kPut;
    if (has_closed(peer)) {
      if (is_put) fail(peer, devices_[0].name, "the peer has closed its end");
      return true;
    }
    QueuePair& pair = pairs_[peer][slot % num_pairs_];
    const int num = is_put && command.num_bytes > 0 ? 2 : 1;
    if (pair.num_sends + num > max_sends_) return false;
    const uint32_t word = is_put ? at.flag_idx(peer, ring, me, slot) : at.credit_idx(peer, ring, me, slot);

    ibv_sge chunk_part{reinterpret_cast<uintptr_t>(window_ + at.send_offset(me, ring, peer, is_put ? slot : 0)),
                       command.num_bytes, devices_[pair.device].window->lkey};
    uint64_t value = command.word;
    ibv_sge word_part{reinterpret_cast<uintptr_t>(&value), sizeof(value), 0};  // inline: read before post returns
    ibv_send_wr chunk = write_of(&chunk_part, pair.remote.window + at.recv_offset(peer, ring, me, is_put ? slot : 0),
                                 pair.remote.window_key);
    ibv_send_wr flag = options_.unordered
                           ? write_of(&word_part, pair.remote.staged + sizeof(uint64_t) * word, pair.remote.staged_key)
                           : write_of(&word_part, pair.remote.words + sizeof(uint64_t) * word, pair.remote.words_key);
    flag.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
    flag.wr_id = id_of(peer, slot % num_pairs_, num);
    if (options_.unordered) {
      set_immediate(&chunk, {Part::kChunk, ring, slot});
      const Part part = !is_put ? Part::kCredit : num == 2 ? Part::kWordOfChunk : Part::kWordAlone;
      set_immediate(&flag, {part, ring, slot});
    }
    chunk.next = &flag;
    post_all(peer, pair, num == 2 ? &chunk : &flag, num);
    return true;
  }

  bool progress() override {
    bool has_worked = false;
    for (VerbsDevice& device : devices_) {
      ibv_wc completions[kPollAtATime];
      const int num = ibv_poll_cq(device.completions.get(), kPollAtATime, completions);
      if (num < 0) fail(-1, device.name, "ibv_poll_cq has failed");
      has_worked |= num > 0;
      if (options_.unordered && num > 0 && is_gpu_memory_) flush_gpu_direct_writes();
      for (int i = 0; i < num; ++i) complete(device, completions[i]);
    }
    if (++turn_ % kLookEvery == 0 && Clock::now() > next_look_) {
      next_look_ = Clock::now() + kLookPause;
      for (VerbsDevice& device : devices_) look_for_events(device);
    }
    return has_worked;
  }

  bool is_quiet() const override { return num_sends_ == 0; }

  // A queue pair that is gone lets its peer's writes fail: so each end waits until the other has sent its closing
  // message.
  void close() override {
    const auto deadline = Clock::now() + kGoodbye;
    for (int peer = 0; peer < layout().num_domains; ++peer) {
      if (!layout().joins(peer) || failure().has_failed() || failure().has_lost(peer)) continue;
      QueuePair& pair = pairs_[peer][0];
      if (pair.num_sends >= max_sends_) continue;
      uint64_t one = 1;
      ibv_sge part{reinterpret_cast<uintptr_t>(&one), sizeof(one), 0};
      ibv_send_wr write =
          write_of(&part, pair.remote.staged + sizeof(uint64_t) * (layout().num_words + layout().domain_idx),
                   pair.remote.staged_key);
      write.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
      write.wr_id = id_of(peer, 0, 1);
      is_closing_ = true;
      post_all(peer, pair, &write, 1);
    }
    const auto all_closed = [&] {
      for (int peer = 0; peer < layout().num_domains; ++peer) {
        if (layout().joins(peer) && !failure().has_lost(peer) && !has_closed(peer)) return false;
      }
      return true;
    };
    while (!failure().has_failed() && !(is_quiet() && all_closed()) && Clock::now() < deadline) {
      if (!progress()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

 private:
  size_t staged_bytes() const { return sizeof(uint64_t) * (layout().num_words + layout().num_domains); }
  uint64_t* staged() const { return reinterpret_cast<uint64_t*>(staged_.get()); }
  bool has_closed(int peer) const {
    return __atomic_load_n(staged() + layout().num_words + peer, __ATOMIC_ACQUIRE) != 0;
  }

  // Writes with immediate that can be on their way from a peer at once: the halves of all slots, and credits.
  int num_receives() const {
    uint32_t num = 0;
    for (int ring = 0; ring < layout().num_rings; ++ring) {
      num += 2 * layout().rings[ring].num_slots + layout().rings[ring].num_credits();
    }
    return static_cast<int>(std::min(num, 4096u));
  }

  // GPU memory by dma-buf, by nvidia-peermem, or pinned host memory instead: whatever all NICs take.
  void register_all() {
    const uint64_t window_bytes = layout().window_bytes, words_bytes = sizeof(uint64_t) * layout().num_words;
    std::string why;
    if (options_.memory != 0) {
      window_ = reinterpret_cast<uint8_t*>(options_.memory);
      words_ = reinterpret_cast<uint64_t*>(window_ + window_bytes);
      if (options_.window_only) take_pinned_words();
      const DmaBuf buffer = export_dmabuf(options_.memory, window_bytes + (options_.window_only ? 0 : words_bytes));
      DmaBuf window = buffer, words = buffer;
      window.num_bytes = window_bytes;
      words.offset += window_bytes;
      words.address += window_bytes;
      words.num_bytes = words_bytes;
      const bool by_dmabuf = buffer.file >= 0 && register_each([&](VerbsDevice& device) {
                               device.window = register_dmabuf(device, window, options_.relaxed_ordering);
                               device.words = options_.window_only ? register_memory(device, words_, words_bytes, false)
                                                                   : register_dmabuf(device, words, false);
                             });
      why = "dma-buf: " + (buffer.file < 0 ? buffer.reason : std::string(std::strerror(errno)));
      if (buffer.file >= 0) ::close(buffer.file);
      const bool by_peermem = !by_dmabuf && register_windows();
      if (!by_dmabuf && !by_peermem) why += std::string("; nvidia-peermem: ") + std::strerror(errno);
      is_gpu_memory_ = by_dmabuf || by_peermem;
      memory_kind_ = by_dmabuf ? "GPU memory by dma-buf" : "GPU memory by nvidia-peermem";
    }
    if (!is_gpu_memory_) {
      if (options_.window_only) throw LinkError(-1, devices_[0].name + " takes no GPU memory: " + why);
      pinned_ = allocate_pinned(window_bytes + words_bytes);
      window_ = pinned_.get();
      words_ = reinterpret_cast<uint64_t*>(window_ + window_bytes);
      if (!register_windows()) refuse_memory();
      memory_kind_ = "pinned host memory" + (why.empty() ? "" : " (" + why + ")");
    }
    if (options_.unordered && is_gpu_memory_) take_pinned_words();  // they are written by the CPU
    for (VerbsDevice& device : devices_) {
      device.staged = register_memory(device, staged_.get(), staged_bytes(), false);
      if (!device.staged) refuse_memory();
    }
  }

  void take_pinned_words() {
    pinned_ = allocate_pinned(sizeof(uint64_t) * layout().num_words);
    words_ = reinterpret_cast<uint64_t*>(pinned_.get());
  }

  template <typename Register>
  bool register_each(Register&& register_one) {
    for (VerbsDevice& device : devices_) {
      register_one(device);
      if (!device.window || !device.words) return false;
    }
    return true;
  }
  bool register_windows() {
    return register_each([&](VerbsDevice& device) {
      device.window = register_memory(device, window_, layout().window_bytes, options_.relaxed_ordering);
      device.words = register_memory(device, words_, sizeof(uint64_t) * layout().num_words, false);
    });
  }
  [[noreturn]] void refuse_memory() const {
    throw LinkError(-1, std::string("verbs: memory cannot be registered: ") + std::strerror(errno) +
                            " (is the limit of locked memory, ulimit -l, high enough?)");
  }

  QueuePair make_pair(int i) {
    QueuePair made{nullptr, static_cast<size_t>(i) % devices_.size(), {}, 0};
    VerbsDevice& device = devices_[made.device];
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = device.completions.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap.max_send_wr = kMaxSends;
    attributes.cap.max_recv_wr = options_.unordered ? static_cast<uint32_t>(num_receives()) : 1;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
    attributes.cap.max_inline_data = sizeof(uint64_t);
    made.pair.reset(verbs_api().create_qp(device.domain.get(), &attributes));
    if (!made.pair) throw LinkError(-1, device.name + ": ibv_create_qp: " + std::strerror(errno));
    max_sends_ = std::min(max_sends_, static_cast<int>(attributes.cap.max_send_wr));
    return made;
  }

  void connect_to(int peer, const std::string& address) {
    std::istringstream text(address);
    size_t num_devices = 0;
    int num_queue_pairs = 0;
    bool unordered = false;
    text >> num_devices >> num_queue_pairs >> unordered;
    if (num_devices != devices_.size() || num_queue_pairs != options_.num_queue_pairs ||
        unordered != options_.unordered) {
      std::ostringstream what;
      what << "verbs: it has " << num_devices << " NICs, " << num_queue_pairs << " queue pairs on each, unordered "
           << unordered << "; this rank " << devices_.size() << ", " << options_.num_queue_pairs << ", "
           << options_.unordered << "; allowed: the same at every rank";
      throw LinkError(peer, what.str());
    }
    struct Nic {
      std::string gid;
      int lid, mtu;
      RemoteMemory memory;
      std::vector<uint16_t> partitions;
    };
    std::vector<Nic> nics(num_devices);
    for (Nic& nic : nics) {
      text >> nic.gid >> nic.lid >> nic.mtu >> nic.memory.window >> nic.memory.words >> nic.memory.staged >>
          nic.memory.window_key >> nic.memory.words_key >> nic.memory.staged_key;
      size_t num_partitions = 0;
      text >> num_partitions;
      nic.partitions.resize(text ? num_partitions : 0);
      for (uint16_t& key : nic.partitions) text >> key;
    }
    std::vector<uint32_t> numbers(static_cast<size_t>(layout().num_domains) * num_pairs_);
    for (uint32_t& number : numbers) text >> number;
    if (!text) throw LinkError(peer, "verbs: its address is not of this transport");
    for (int i = 0; i < num_pairs_; ++i) {
      QueuePair& pair = pairs_[peer][i];
      const Nic& nic = nics[pair.device];
      pair.remote = nic.memory;
      bring_up(peer, i, nic.gid, nic.lid, nic.mtu, choose_partition(peer, devices_[pair.device], nic.partitions),
               numbers[layout().domain_idx * num_pairs_ + i]);
    }
  }

  // The index of the first partition in the table of the lower domain that both have. Both ends choose the same one.
  int choose_partition(int peer, const VerbsDevice& device, const std::vector<uint16_t>& theirs) const {
    const auto is_same = [](uint16_t key, uint16_t other) { return (key & 0x7fff) == (other & 0x7fff); };
    size_t best = theirs.size();
    int best_idx = -1;
    for (const Partition& mine : device.partitions) {
      const auto found =
          std::find_if(theirs.begin(), theirs.end(), [&](uint16_t key) { return is_same(key, mine.key); });
      const auto place = static_cast<size_t>(found - theirs.begin());
      if (place == theirs.size()) continue;
      if (layout().domain_idx < peer) return mine.idx;
      if (place < best) best_idx = mine.idx;
      best = std::min(best, place);
    }
    if (best_idx >= 0) return best_idx;
    throw LinkError(peer, device.name +
                              " and the peer's port share no partition; allowed: HYBRID_EP_PKEY_INDEX names "
                              "one that both are in, or the subnet manager makes both full members of one");
  }

  void bring_up(int peer, int i, const std::string& gid, int lid, int mtu, int pkey_index, uint32_t number) {
    QueuePair& pair = pairs_[peer][i];
    VerbsDevice& device = devices_[pair.device];
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = static_cast<uint8_t>(device.port_number);
    attributes.pkey_index = static_cast<uint16_t>(pkey_index);
    attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    modify(peer, pair, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
    for (int i = 0; options_.unordered && i < num_receives(); ++i) post_receive(pair);

    attributes = {};
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = std::min(static_cast<ibv_mtu>(mtu), device.port.active_mtu);
    if (options_.mtu_bytes > 0) attributes.path_mtu = std::min(attributes.path_mtu, mtu_of(options_.mtu_bytes));
    attributes.dest_qp_num = number;
    attributes.rq_psn = kFirstPacket;
    attributes.max_dest_rd_atomic = 1;
    attributes.min_rnr_timer = 12;
    attributes.ah_attr.port_num = static_cast<uint8_t>(device.port_number);
    attributes.ah_attr.sl = static_cast<uint8_t>(options_.service_level);
    if (device.port.link_layer == IBV_LINK_LAYER_ETHERNET || options_.gid_index >= 0) {
      attributes.ah_attr.is_global = 1;
      attributes.ah_attr.grh.dgid = from_hex(gid);
      attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(device.gid_index);
      attributes.ah_attr.grh.hop_limit = 64;
      attributes.ah_attr.grh.traffic_class = static_cast<uint8_t>(options_.traffic_class);
      // RoCE takes the UDP source port from it: switches with several paths spread queue pairs over them.
      const int number_of_pair = i + num_pairs_ * (peer + layout().num_domains * layout().domain_idx);
      attributes.ah_attr.grh.flow_label = static_cast<uint32_t>(1 + number_of_pair % kMaxFlowLabel);
    }
    attributes.ah_attr.dlid = static_cast<uint16_t>(lid);
    modify(peer, pair, &attributes,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
               IBV_QP_MIN_RNR_TIMER,
           "RTR");

    const VerbsRetries retries = retries_of(options_.timeout_s);
    attributes = {};
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = static_cast<uint8_t>(retries.timeout);
    attributes.retry_cnt = attributes.rnr_retry = static_cast<uint8_t>(retries.retries);
    attributes.sq_psn = kFirstPacket;
    attributes.max_rd_atomic = 1;
    modify(
        peer, pair, &attributes,
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
        "RTS");
  }

  void modify(int peer, QueuePair& pair, ibv_qp_attr* attributes, int mask, const char* state) const {
    const int error = verbs_api().modify_qp(pair.pair.get(), attributes, mask);
    if (error == 0) return;
    throw LinkError(
        peer, devices_[pair.device].name + ": a queue pair does not reach " + state + ": " + std::strerror(error));
  }

  static ibv_send_wr write_of(ibv_sge* part, uint64_t remote, uint32_t key) {
    ibv_send_wr write{};
    write.sg_list = part;
    write.num_sge = 1;
    write.opcode = IBV_WR_RDMA_WRITE;
    write.wr.rdma.remote_addr = remote;
    write.wr.rdma.rkey = key;
    return write;
  }
  static void set_immediate(ibv_send_wr* write, Immediate immediate) {
    write->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    write->imm_data = htonl(immediate.pack());
  }

  // A signaled work request holds its peer, and how many requests have ended with it.
  static uint64_t id_of(int peer, int pair, int num) {
    return static_cast<uint64_t>(peer) << 32 | static_cast<uint64_t>(pair) << 8 | static_cast<uint64_t>(num);
  }

  void post_all(int peer, QueuePair& pair, ibv_send_wr* first, int num) {
    ibv_send_wr* refused = nullptr;
    const int error = ibv_post_send(pair.pair.get(), first, &refused);
    if (error != 0) {
      fail(peer, devices_[pair.device].name, std::string("ibv_post_send: ") + std::strerror(error));
      return;
    }
    pair.num_sends += num;
    num_sends_ += num;
  }

  void post_receive(QueuePair& pair) {
    ibv_recv_wr receive{}, *refused = nullptr;
    (void)ibv_post_recv(pair.pair.get(), &receive, &refused);  // of a broken pair: its completions have the reason
  }

  void complete(VerbsDevice& device, const ibv_wc& completion) {
    if (completion.status != IBV_WC_SUCCESS) {
      // The opcode is not valid here. Receives have no number.
      const int peer = completion.wr_id != 0 ? static_cast<int>(completion.wr_id >> 32) : find_peer(completion.qp_num);
      if (completion.status == IBV_WC_WR_FLUSH_ERR || is_closing_ || (peer >= 0 && has_closed(peer))) {
        forget(completion);
        return;
      }
      fail(peer, device.name,
           std::string(verbs_api().wc_status_str(completion.status)) + " (status " + std::to_string(completion.status) +
               ", vendor error " + std::to_string(completion.vendor_err) + ", queue pair " +
               std::to_string(completion.qp_num) + ")");
      forget(completion);
      return;
    }
    if (completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
      forget(completion);
      return;
    }
    const int peer = find_peer(completion.qp_num);
    const int64_t word = arrivals_.take(peer, Immediate::unpack(ntohl(completion.imm_data)));
    if (word == -2) fail(peer, device.name, "the peer has sent what does not fit the link's layout");
    if (word >= 0) __atomic_store_n(words_ + word, staged()[word], __ATOMIC_RELEASE);
    for (QueuePair& pair : pairs_[peer]) {
      if (pair.pair->qp_num == completion.qp_num) post_receive(pair);
    }
  }

  void forget(const ibv_wc& completion) {
    if (completion.wr_id == 0) return;
    const int num = static_cast<int>(completion.wr_id & 0xff);
    pairs_[completion.wr_id >> 32][completion.wr_id >> 8 & 0xffffff].num_sends -= num;
    num_sends_ -= num;
  }

  int find_peer(uint32_t number) const {
    for (size_t peer = 0; peer < pairs_.size(); ++peer) {
      for (const QueuePair& pair : pairs_[peer]) {
        if (pair.pair->qp_num == number) return static_cast<int>(peer);
      }
    }
    return -1;
  }

  // A port that is down may come back: it is lost when retries would have given up.
  void look_for_events(VerbsDevice& device) {
    ibv_async_event event{};
    while (verbs_api().get_async_event(device.context.get(), &event) == 0) {
      const ibv_event_type type = event.event_type;
      verbs_api().ack_async_event(&event);
      if (type == IBV_EVENT_PORT_ERR) port_down_since_ = Clock::now();
      if (type == IBV_EVENT_PORT_ACTIVE) port_down_since_ = Clock::time_point();
      if (type == IBV_EVENT_DEVICE_FATAL) fail(-1, device.name, verbs_api().event_type_str(type));
    }
    if (port_down_since_ != Clock::time_point() &&
        Clock::now() - port_down_since_ > std::chrono::duration<double>(options_.timeout_s / 2)) {
      fail(-1, device.name, "the port is down");
    }
  }

  const VerbsOptions options_;
  Arrivals arrivals_;
  Memory staged_, pinned_;
  uint8_t* window_ = nullptr;
  uint64_t* words_ = nullptr;
  std::string memory_kind_;
  bool is_gpu_memory_ = false, is_closing_ = false;
  std::vector<VerbsDevice> devices_;
  std::vector<std::vector<QueuePair>> pairs_;  // by domain
  int num_pairs_ = 0, max_sends_ = kMaxSends;
  int64_t num_sends_ = 0;  // not complete
  uint64_t turn_ = 0;
  Clock::time_point port_down_since_, next_look_;
};

}  // namespace

const bool kHasVerbs = true;

VerbsRetries retries_of(double timeout_s) {
  // With 7, some drivers retry without end. NICs take up to four times as long as the formula gives.
  constexpr int kRetries = 6, kMaxTimeout = 20, kMinTimeout = 8;
  constexpr double kUnit_s = 4.096e-6, kSlowness = 4;
  const double once_s = timeout_s / 2 / kSlowness / (kRetries + 1);
  const int timeout = static_cast<int>(std::floor(std::log2(std::max(once_s / kUnit_s, 1.0))));
  return {std::clamp(timeout, kMinTimeout, kMaxTimeout), kRetries};
}

std::unique_ptr<Link> make_verbs_link(const LinkLayout& layout, const VerbsOptions& options) {
  return std::make_unique<VerbsLink>(layout, options);
}

}  // namespace hybrid_ep
