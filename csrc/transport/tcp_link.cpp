#include "transport/tcp_link.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "common/check.h"
#include "transport/tcp_connection.h"

namespace hybrid_ep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxEvents = 64;
constexpr auto kGoodbye = std::chrono::seconds(2);  // how long close() waits for peers to close too

// Callers that have not said who they are. One more waits until the first has had its time; then the first is dropped.
constexpr size_t kMaxCallers = 256;
constexpr auto kCallersTime = std::chrono::seconds(2);

// The first bytes of a connection: who connects.
struct Hello {
  uint64_t secret;  // of the rank that listens
  uint32_t domain_idx, number;
};

// A descriptor with an owner.
class File {
 public:
  explicit File(int file = -1) : file_(file) {}
  File(File&& other) noexcept : file_(other.release()) {}
  File& operator=(File&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~File() {
    if (file_ >= 0) ::close(file_);
  }
  int get() const { return file_; }
  int release() { return std::exchange(file_, -1); }

 private:
  int file_;
};

// A connection that has not said who it is.
struct Caller {
  File socket;
  Clock::time_point since;
  Hello hello{};
  size_t num_read = 0;  // bytes of its hello
};

std::string error_text(const std::string& what) { return what + ": " + std::strerror(errno); }

// A numeric address in the form of the socket calls.
struct Endpoint {
  sockaddr_storage address{};
  socklen_t length = 0;

  Endpoint(int peer, const std::string& host, const std::string& port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const int status = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
    if (status != 0) throw LinkError(peer, "tcp: address '" + host + "' port '" + port + "': " + gai_strerror(status));
    std::memcpy(&address, found->ai_addr, found->ai_addrlen);
    length = found->ai_addrlen;
    freeaddrinfo(found);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// Waits for one of the sockets. Returns false at the deadline.
bool wait_for_any(std::vector<pollfd>& waiters, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int status = poll(waiters.data(), waiters.size(), static_cast<int>(std::max<int64_t>(left, 0)));
    if (status > 0) return true;
    if (status == 0 || errno != EINTR) return false;
  }
}

bool wait_for(int socket, short events, Clock::time_point deadline) {
  std::vector<pollfd> waiters{{socket, events, 0}};
  return wait_for_any(waiters, deadline);
}

class TcpLink final : public Link {
 public:
  TcpLink(const LinkLayout& layout, const TcpOptions& options)
      : Link(layout),
        options_(options),
        memory_(allocate_pinned(layout.window_bytes + sizeof(uint64_t) * layout.num_words)),
        connections_(layout.num_domains) {
    require(options.num_connections >= 1 && options.num_connections <= 16, "num_connections", options.num_connections,
            "1 to 16");
    const Endpoint own(-1, options.host, "0");
    listener_ = File(socket(own.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (listener_.get() < 0 || bind(listener_.get(), own.get(), own.length) != 0 ||
        listen(listener_.get(), 1024) != 0) {
      throw LinkError(-1, error_text("tcp: listen on " + options.host));
    }
    std::random_device random;
    secret_ = static_cast<uint64_t>(random()) << 32 | random();
    epoll_ = File(epoll_create1(EPOLL_CLOEXEC));
    if (epoll_.get() < 0) throw LinkError(-1, error_text("tcp: epoll_create1"));
  }

  uint8_t* window() const override { return memory_.get(); }
  uint64_t* words() const override { return reinterpret_cast<uint64_t*>(memory_.get() + layout().window_bytes); }
  std::string describe() const override {
    return "tcp from " + options_.host + ", " + std::to_string(options_.num_connections) +
           " connections a peer, rings in pinned host memory";
  }

  std::string address() const override {
    sockaddr_storage bound{};
    socklen_t length = sizeof(bound);
    getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound), &length);
    const uint16_t port = bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                      : reinterpret_cast<sockaddr_in*>(&bound)->sin_port;
    std::ostringstream text;
    text << options_.host << ' ' << ntohs(port) << ' ' << secret_ << ' ' << options_.num_connections;
    return text.str();
  }

  // The higher domain of two connects to the lower one, which need not have begun to accept.
  void connect(const std::vector<std::string>& addresses, double timeout_s) override {
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    for (auto& of_peer : connections_) of_peer.resize(options_.num_connections);
    for (int peer = 0; peer < layout().domain_idx; ++peer) {
      if (!layout().joins(peer)) continue;
      std::istringstream text(addresses[peer]);
      std::string host, port;
      Hello hello{0, static_cast<uint32_t>(layout().domain_idx), 0};
      int num_connections = 0;
      text >> host >> port >> hello.secret >> num_connections;
      if (num_connections != options_.num_connections) {
        throw LinkError(peer, "tcp: its address is '" + addresses[peer] + "', with " + std::to_string(num_connections) +
                                  " connections and not " + std::to_string(options_.num_connections));
      }
      for (; hello.number < static_cast<uint32_t>(num_connections); ++hello.number) {
        keep(open_to(peer, Endpoint(peer, host, port), hello, deadline), peer, hello.number);
      }
    }
    accept_peers(deadline);
    listener_ = File();
  }

  bool post(const Command& command) override {
    const int me = layout().domain_idx;
    TcpConnection& connection = *connections_[command.peer][command.slot % options_.num_connections];
    if (is_closed_.count(&connection) != 0) {
      if (command.kind == CommandKind::kPut) fail(command.peer, name_of(connection), "the peer has closed its end");
      return true;
    }
    if (!connection.can_queue()) return false;
    const uint8_t* payload = command.kind == CommandKind::kPut
                                 ? window() + layout().send_offset(me, command.ring, command.peer, command.slot)
                                 : nullptr;
    connection.add(command, payload);
    unflushed_.insert(&connection);
    return true;
  }

  bool progress() override {
    bool has_worked = false;
    for (auto it = unflushed_.begin(); it != unflushed_.end();) {
      TcpConnection* connection = *it;
      const SocketState state = connection->flush(&has_worked);
      if (state == SocketState::kOpen && connection->has_frames()) {
        watch(*connection, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
      }
      it = unflushed_.erase(it);
      settle(*connection, state);
    }
    epoll_event events[kMaxEvents];
    const int num = epoll_wait(epoll_.get(), events, kMaxEvents, 0);
    for (int i = 0; i < num; ++i) {
      auto& connection = *static_cast<TcpConnection*>(events[i].data.ptr);
      SocketState state = SocketState::kOpen;
      if ((events[i].events & EPOLLOUT) != 0) {
        state = connection.flush(&has_worked);
        if (state == SocketState::kOpen && !connection.has_frames()) watch(connection, EPOLLIN, EPOLL_CTL_MOD);
      }
      if (state == SocketState::kOpen) {
        state = connection.receive([&](const Command& command) { return target_of(connection.peer(), command); },
                                   &has_worked);
      }
      settle(connection, state);
    }
    return has_worked;
  }

  bool is_quiet() const override {
    for (const auto& of_peer : connections_) {
      for (const auto& connection : of_peer) {
        if (connection != nullptr && connection->has_frames() && is_closed_.count(connection.get()) == 0) return false;
      }
    }
    return true;
  }

  int wait_fd() const override { return epoll_.get(); }

  // Closing a socket with unread bytes may discard what it has sent. So each end waits for the other's closing message.
  void close() override {
    size_t num_open = 0;
    for (const auto& of_peer : connections_) {
      for (const auto& connection : of_peer) {
        if (connection == nullptr || is_closed_.count(connection.get()) != 0) continue;
        connection->say_goodbye();
        ++num_open;
      }
    }
    const auto deadline = Clock::now() + kGoodbye;
    const size_t num_ended = is_closed_.size() + num_open;
    while (is_closed_.size() < num_ended && wait_for(epoll_.get(), POLLIN, deadline)) progress();
  }

 private:
  static std::string name_of(const TcpConnection& connection) { return "tcp to " + connection.address(); }

  void keep(File socket, int peer, int number) {
    auto& connection = connections_[peer][number];
    connection = std::make_unique<TcpConnection>(socket.release(), peer, options_.timeout_s);
    watch(*connection, EPOLLIN, EPOLL_CTL_ADD);
  }

  File open_to(int peer, const Endpoint& endpoint, const Hello& hello, Clock::time_point deadline) const {
    File file(socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (file.get() < 0) throw LinkError(-1, error_text("tcp: socket"));
    int status = ::connect(file.get(), endpoint.get(), endpoint.length);
    if (status != 0 && errno == EINPROGRESS) {
      if (!wait_for(file.get(), POLLOUT, deadline)) throw LinkError(peer, "tcp: it cannot be reached in time");
      socklen_t length = sizeof(status);
      getsockopt(file.get(), SOL_SOCKET, SO_ERROR, &status, &length);
      errno = status;
    }
    if (status != 0) throw LinkError(peer, error_text("tcp: connect"));
    if (send(file.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(hello))) {
      throw LinkError(peer, error_text("tcp: send"));
    }
    return file;
  }

  // Accepts connections until all peers are there. A stranger may connect, too, and say nothing: no peer waits for it.
  void accept_peers(Clock::time_point deadline) {
    std::vector<Caller> callers;  // by `since`
    for (int missing = first_missing(); missing >= 0; missing = first_missing()) {
      if (Clock::now() >= deadline) {
        throw LinkError(missing, "tcp: it has not connected to " + options_.host + " in time");
      }
      if (callers.size() == kMaxCallers && Clock::now() >= callers.front().since + kCallersTime) {
        callers.erase(callers.begin());
      }
      const bool is_full = callers.size() == kMaxCallers;
      std::vector<pollfd> waiters;
      for (const Caller& caller : callers) waiters.push_back({caller.socket.get(), POLLIN, 0});
      if (!is_full) waiters.push_back({listener_.get(), POLLIN, 0});
      if (!wait_for_any(waiters, is_full ? std::min(deadline, callers.front().since + kCallersTime) : deadline)) {
        continue;
      }
      const bool is_called = !is_full && waiters.back().revents != 0;
      for (size_t i = callers.size(); i-- > 0;) {
        if (waiters[i].revents != 0 && has_ended(callers[i])) callers.erase(callers.begin() + static_cast<int64_t>(i));
      }
      if (is_called) accept_caller(callers);
    }
  }

  void accept_caller(std::vector<Caller>& callers) const {
    File file(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (file.get() >= 0) {
      callers.push_back({std::move(file), Clock::now()});
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      throw LinkError(-1, error_text("tcp: accept on " + options_.host));  // the caller stays, and so would the error
    }
  }

  // Reads what a caller has sent. Returns whether it is one no more: it is a peer and is kept, or is to be dropped.
  bool has_ended(Caller& caller) {
    auto* bytes = reinterpret_cast<uint8_t*>(&caller.hello);
    const ssize_t more = recv(caller.socket.get(), bytes + caller.num_read, sizeof(caller.hello) - caller.num_read, 0);
    if (more <= 0) return more == 0 || (errno != EAGAIN && errno != EINTR);
    caller.num_read += static_cast<size_t>(more);
    if (caller.num_read < sizeof(caller.hello)) return false;
    const Hello& hello = caller.hello;
    const bool is_peer = hello.secret == secret_ && hello.domain_idx > static_cast<uint32_t>(layout().domain_idx) &&
                         layout().joins(static_cast<int>(hello.domain_idx)) &&
                         hello.number < static_cast<uint32_t>(options_.num_connections);
    if (is_peer && connections_[hello.domain_idx][hello.number] == nullptr) {
      keep(std::move(caller.socket), static_cast<int>(hello.domain_idx), static_cast<int>(hello.number));
    }
    return true;
  }

  int first_missing() const {
    for (int peer = layout().domain_idx + 1; peer < layout().num_domains; ++peer) {
      if (!layout().joins(peer)) continue;
      for (const auto& connection : connections_[peer]) {
        if (connection == nullptr) return peer;
      }
    }
    return -1;
  }

  void watch(TcpConnection& connection, uint32_t events, int how) {
    epoll_event event{};
    event.events = events;
    event.data.ptr = &connection;
    (void)epoll_ctl(epoll_.get(), how, connection.socket(), &event);
  }

  void settle(TcpConnection& connection, SocketState state) {
    if (state == SocketState::kOpen || !is_closed_.insert(&connection).second) return;
    watch(connection, 0, EPOLL_CTL_DEL);
    if (state == SocketState::kLost) {
      fail(connection.peer(), name_of(connection), connection.error());
    } else {
      connection.say_goodbye();  // the peer waits for it
    }
  }

  FrameTarget target_of(int peer, const Command& command) const {
    const int me = layout().domain_idx, ring = command.ring, slot = command.slot;
    Command received = command;
    received.peer = peer;
    if (!fits(layout(), received)) return {nullptr, nullptr};
    if (command.kind == CommandKind::kCredit) return {nullptr, words() + layout().credit_idx(me, ring, peer, slot)};
    return {window() + layout().recv_offset(me, ring, peer, slot), words() + layout().flag_idx(me, ring, peer, slot)};
  }

  const TcpOptions options_;
  Memory memory_;
  std::vector<std::vector<std::unique_ptr<TcpConnection>>> connections_;  // by domain and number
  std::set<TcpConnection*> unflushed_, is_closed_;
  File listener_, epoll_;
  uint64_t secret_;
};

}  // namespace

std::unique_ptr<Link> make_tcp_link(const LinkLayout& layout, const TcpOptions& options) {
  return std::make_unique<TcpLink>(layout, options);
}

}  // namespace hybrid_ep
