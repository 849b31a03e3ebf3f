// The host side of a link between domains: what a transport implements, and what the proxy asks of it.
//
// A transport moves chunks from send slots to receive slots, and words (layout/link_layout.h). It owns this rank's
// window and words, or registers what it is given. It must write a flag only after every byte of the chunk can be read
// by the receiving GPU; it need not keep any other order.
//
// Life: constructor → address() to all peers → connect() → post() and progress() → close(). Constructor, address() and
// connect() are called by the thread that makes the link, everything else by the proxy's thread alone. Constructor and
// connect() throw LinkError; later faults go to failure() and never throw.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "layout/link_layout.h"
#include "transport/command.h"
#include "transport/failure.h"

namespace hybrid_ep {

// Thrown if a link cannot be made. `peer` is the domain index of the peer at fault; −1: none is.
class LinkError : public std::runtime_error {
 public:
  LinkError(int peer, const std::string& what) : std::runtime_error(what), peer(peer) {}
  const int peer;
};

class Link {
 public:
  explicit Link(const LinkLayout& layout) : layout_(layout) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const LinkLayout& layout() const { return layout_; }
  virtual FailureReport& failure() { return failure_; }

  // This rank's memory, zero before the first call. Kernels use it through LinkView.
  virtual uint8_t* window() const = 0;
  virtual uint64_t* words() const = 0;
  // The windows of all domains as this GPU maps them, each followed by its words, if kernels write their peers' windows
  // themselves. Such kernels give no commands. Empty: the proxy carries out the commands of kernels.
  virtual std::vector<uint8_t*> mapped_windows() const { return {}; }
  // The rate that kernels of mapped windows keep to, in 10⁹ bytes a second; 0: none.
  virtual double gbytes_per_s() const { return 0; }
  // The PEs of the peers, by domain; empty without NVSHMEM.
  virtual std::vector<int> pes() const { return {}; }
  // Describes for people what the link uses: devices, kind of memory, connections.
  virtual std::string describe() const = 0;

  // Returns what peers need to connect to this rank. Only the transport knows the format.
  virtual std::string address() const = 0;
  // Connects to every peer. `addresses` are those of all domains by index; this rank's is ignored.
  virtual void connect(const std::vector<std::string>& addresses, double timeout_s) = 0;

  // Begins a put or credit, which has been checked against the layout. Returns false if its queue is full: the proxy
  // calls again after progress(), with the same command.
  virtual bool post(const Command& command) = 0;
  // Sends what post() has queued, and processes completions and arrivals. Never blocks. Returns whether there was
  // anything to do.
  virtual bool progress() = 0;
  // Whether everything that was posted is complete, so that nothing needs progress().
  virtual bool is_quiet() const = 0;
  // A file descriptor that becomes readable when progress() is needed although no call is open; −1: none.
  virtual int wait_fd() const { return -1; }
  // Ends the connections in order. Peers that are still in a call see it through their own transport.
  virtual void close() {}

 protected:
  void fail(int peer, std::string device, std::string detail) {
    failure_.report({peer, std::move(device), std::move(detail)});
  }

 private:
  LinkLayout layout_;
  FailureReport failure_;
};

}  // namespace hybrid_ep
