// One socket of the tcp transport. It sends frames from send slots and receives them into receive slots, without a
// copy.
//
//     frame: 16 bytes of a packed command │ payload of a put
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "transport/command.h"

namespace hybrid_ep {

// The places for a frame's payload, and for its word once the payload is there.
struct FrameTarget {
  uint8_t* payload;
  uint64_t* word;
};

// The state of a connection after a turn.
enum class SocketState { kOpen, kClosedInOrder, kLost };

class TcpConnection {
 public:
  // Takes a connected socket, makes it non-blocking, and bounds how long a silent peer goes unnoticed.
  TcpConnection(int socket, int peer, double timeout_s);
  ~TcpConnection();
  TcpConnection(const TcpConnection&) = delete;
  TcpConnection& operator=(const TcpConnection&) = delete;

  int socket() const { return socket_; }
  int peer() const { return peer_; }
  // The peer's address, with its port.
  const std::string& address() const { return address_; }
  // Why the connection is lost.
  const std::string& error() const { return error_; }

  // Queues a frame. The payload stays as it is until the peer has it.
  void add(const Command& command, const uint8_t* payload);
  bool can_queue() const { return out_.size() < kMaxQueued; }
  bool has_frames() const { return !out_.empty(); }

  // Writes and reads what the socket takes and has. *has_worked is set where bytes have moved. `find_target` returns
  // where a frame's payload and word go; a frame that fits nowhere has no word there.
  SocketState flush(bool* has_worked);
  template <typename FindTarget>
  SocketState receive(FindTarget&& find_target, bool* has_worked);

  // Queues the closing message: no more frames will follow. May be called again.
  void say_goodbye();

 private:
  static constexpr size_t kMaxQueued = 256;
  static constexpr int kReadsPerTurn = 16;
  struct Frame {
    PackedCommand header;
    const uint8_t* payload;
  };

  SocketState lose(std::string why);
  SocketState read_more(bool* has_worked);

  const int socket_, peer_;
  std::string address_, error_;
  std::deque<Frame> out_;
  size_t sent_ = 0;  // of the first frame
  PackedCommand header_{};
  size_t header_bytes_ = 0;  // read of header_
  Command command_{};
  FrameTarget target_{};
  size_t payload_left_ = 0;
  bool is_done_ = false;  // the peer has sent its closing message
  bool has_said_goodbye_ = false;
};

template <typename FindTarget>
SocketState TcpConnection::receive(FindTarget&& find_target, bool* has_worked) {
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    bool has_read = false;
    const SocketState state = read_more(&has_read);
    *has_worked |= has_read;
    if (state != SocketState::kOpen || !has_read) return state;
    if (payload_left_ == 0 && target_.word != nullptr) {
      __atomic_store_n(target_.word, command_.word, __ATOMIC_RELEASE);
      target_.word = nullptr;
    }
    if (header_bytes_ < sizeof(header_)) continue;
    header_bytes_ = 0;
    command_ = unpack(header_);
    if (command_.kind == CommandKind::kEnd) {
      is_done_ = true;
      continue;
    }
    target_ = find_target(command_);
    if (target_.word == nullptr) return lose("the peer has sent what does not fit the link's layout");
    payload_left_ = command_.kind == CommandKind::kPut ? command_.num_bytes : 0;
    if (payload_left_ == 0) {
      __atomic_store_n(target_.word, command_.word, __ATOMIC_RELEASE);
      target_.word = nullptr;
    }
  }
  return SocketState::kOpen;
}

}  // namespace hybrid_ep
