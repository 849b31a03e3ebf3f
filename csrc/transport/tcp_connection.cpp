#include "transport/tcp_connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace hybrid_ep {
namespace {

constexpr size_t kMaxFramesPerCall = 32;

template <typename Value>
void set_option(int socket, int level, int name, Value value) {
  (void)setsockopt(socket, level, name, &value, sizeof(value));  // a system without it has its own limits
}

std::string address_of_peer(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), length, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown address";
  }
  return std::string(host) + " port " + port;
}

}  // namespace

TcpConnection::TcpConnection(int socket, int peer, double timeout_s)
    : socket_(socket), peer_(peer), address_(address_of_peer(socket)) {
  (void)fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // A peer that answers nothing is lost after half the timeout, whether or not something is on its way to it: so the
  // transport reports the peer before the kernels' waits end.
  const double silent_s = timeout_s / 2;
  const int probe_s = std::clamp(static_cast<int>(silent_s / 4), 1, 60);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, probe_s);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, probe_s);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<unsigned>(std::max(silent_s * 1e3, 1.0)));
}

TcpConnection::~TcpConnection() { ::close(socket_); }

void TcpConnection::add(const Command& command, const uint8_t* payload) { out_.push_back({pack(command, 0), payload}); }

void TcpConnection::say_goodbye() {
  if (std::exchange(has_said_goodbye_, true)) return;
  add({CommandKind::kEnd, 0, 0, 0, 0, 0}, nullptr);
  bool has_worked = false;
  (void)flush(&has_worked);
  shutdown(socket_, SHUT_WR);
}

SocketState TcpConnection::lose(std::string why) {
  error_ = std::move(why);
  return SocketState::kLost;
}

SocketState TcpConnection::flush(bool* has_worked) {
  while (!out_.empty()) {
    iovec parts[2 * kMaxFramesPerCall];
    size_t num_parts = 0, skip = sent_;
    const auto add_part = [&](const void* data, size_t num_bytes) {
      if (skip >= num_bytes) {
        skip -= num_bytes;
      } else {
        parts[num_parts++] = {const_cast<uint8_t*>(static_cast<const uint8_t*>(data)) + skip, num_bytes - skip};
        skip = 0;
      }
    };
    for (size_t i = 0; i < std::min(out_.size(), kMaxFramesPerCall); ++i) {
      add_part(&out_[i].header, sizeof(PackedCommand));
      if (out_[i].payload != nullptr) add_part(out_[i].payload, out_[i].header.num_bytes);
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    const ssize_t sent = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return SocketState::kOpen;
      if (errno == EINTR) continue;
      return lose(std::strerror(errno));
    }
    *has_worked = true;
    sent_ += static_cast<size_t>(sent);
    while (!out_.empty()) {
      const Frame& frame = out_.front();
      const size_t size = sizeof(PackedCommand) + (frame.payload != nullptr ? frame.header.num_bytes : 0);
      if (sent_ < size) break;
      sent_ -= size;
      out_.pop_front();
    }
  }
  return SocketState::kOpen;
}

// Reads the rest of a payload, and the next header behind it.
SocketState TcpConnection::read_more(bool* has_worked) {
  iovec parts[2] = {{target_.payload, payload_left_},
                    {reinterpret_cast<uint8_t*>(&header_) + header_bytes_, sizeof(header_) - header_bytes_}};
  const bool has_payload = payload_left_ > 0;
  const ssize_t num_read = readv(socket_, has_payload ? parts : parts + 1, has_payload ? 2 : 1);
  if (num_read < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return SocketState::kOpen;
    return lose(std::strerror(errno));
  }
  if (num_read == 0) {
    if (is_done_) return SocketState::kClosedInOrder;
    return lose("the peer's process has ended, or closed its socket in the middle");
  }
  *has_worked = true;
  const size_t of_payload = std::min(static_cast<size_t>(num_read), payload_left_);
  target_.payload += of_payload;
  payload_left_ -= of_payload;
  header_bytes_ += static_cast<size_t>(num_read) - of_payload;
  return SocketState::kOpen;
}

}  // namespace hybrid_ep
