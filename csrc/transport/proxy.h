// The thread that carries out kernels' commands: one for each rank with peers in other domains.
//
//     kernels ─ FIFOs ─► proxy thread ─ Link::post ─► network        begin_call (host) and kEnd (kernel) bracket a call
//
// While a call is open the thread spins over the FIFOs and the link. When none is open, and everything posted is
// complete, it sleeps until begin_call() or until the link's file descriptor wakes it. In a call in which nothing has
// happened for a while the thread polls less and less often.
//
// After a failure the thread takes commands and drops them, so that no kernel waits for a free entry of a FIFO. If the
// link keeps its other peers, the thread drops only the commands for the lost peer.
//
// A forked child has no such thread: every function throws there, and the destructor does nothing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transport/link.h"
#include "transport/link_view.h"

namespace hybrid_ep {

struct ProxyOptions {
  int num_fifos = 8;
  int device = 0;         // the GPU whose kernels write the commands
  std::vector<int> cpus;  // where the thread may run; empty: anywhere
};

struct ProxyCounts {
  uint64_t puts, credits, calls;  // taken from the FIFOs
  uint64_t bytes;                 // of puts
  uint64_t sleeps;                // times that the thread went to sleep
};

class Proxy {
 public:
  Proxy(std::unique_ptr<Link> link, const ProxyOptions& options);
  ~Proxy();  // closes without waiting
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  std::string address() const;
  // Connects the link and starts the thread. Once.
  void connect(const std::vector<std::string>& addresses, double timeout_s);

  // The view of the link for kernels. Its pointers live as long as the proxy.
  LinkView view() const;

  // Opens a call: before a kernel with commands is launched, once for each. Any thread, cheap, and allowed in a host
  // function of a stream, which is how a captured graph opens the calls of its replays (begin_call_of).
  void begin_call();
  static void begin_call_of(void* proxy) noexcept;  // cudaHostFn_t
  // Undoes begin_call(): the launch was refused, so no kernel ends the call.
  void take_back_call();

  // From now on the loss of a peer is no failure of the link: chunks for that peer are dropped.
  void keep_other_peers();
  // The first failure of the link.
  std::optional<LinkFailure> failure() const;
  ProxyCounts counts() const;
  Link& link() { return *link_; }

  // Waits until every call has ended, its commands are carried out and the link is quiet. Returns false after
  // timeout_s, or when the link has failed.
  bool drain(double timeout_s) const;

  // Completes the commands in the FIFOs, for timeout_s at most, ends the connections, and joins the thread. Kernels
  // must have ended. Returns whether everything was completed. May be called again.
  bool close(double timeout_s);

 private:
  void require_own_process() const;
  void run();
  bool sweep();
  bool carry_out(const Command& command);
  void sleep(int64_t timeout_ns);
  void wake();

  const pid_t pid_;
  std::unique_ptr<Link> link_;
  const ProxyOptions options_;
  Memory pinned_, cursors_;
  FifoView fifos_{};
  std::vector<FifoReader> readers_;
  int doorbell_ = -1;  // eventfd
  std::thread thread_;
  std::atomic<uint64_t> opened_{0};
  std::atomic<uint64_t> drained_{0};  // calls that had ended when there was nothing left to do
  uint64_t ended_ = 0;                // of the thread
  std::atomic<bool> is_asleep_{false}, stops_{false};
  std::atomic<int64_t> stop_deadline_ns_{0};
  std::atomic<bool> is_complete_{true};
  std::atomic<uint64_t> puts_{0}, credits_{0}, calls_{0}, bytes_{0}, sleeps_{0};
};

}  // namespace hybrid_ep
