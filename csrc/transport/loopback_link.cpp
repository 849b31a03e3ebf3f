#include "transport/loopback_link.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace hybrid_ep {
namespace {

// A file without a name, mapped: window, then words.
class SharedFile {
 public:
  SharedFile(int file, size_t num_bytes) : file_(file), num_bytes_(num_bytes) {
    void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
      const int error = errno;
      ::close(file);
      throw LinkError(-1, std::string("loopback: mmap: ") + std::strerror(error));
    }
    memory_ = static_cast<uint8_t*>(memory);
  }
  ~SharedFile() {
    munmap(memory_, num_bytes_);
    ::close(file_);
  }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  int file() const { return file_; }
  uint8_t* memory() const { return memory_; }

 private:
  int file_;
  size_t num_bytes_;
  uint8_t* memory_ = nullptr;
};

class LoopbackLink final : public Link {
 public:
  explicit LoopbackLink(const LinkLayout& layout) : Link(layout), files_(layout.num_domains) {
    const int file = memfd_create("hybrid_ep_loopback", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(file_bytes())) != 0) {
      throw LinkError(-1, std::string("loopback: memfd_create: ") + std::strerror(errno));
    }
    map(layout.domain_idx, file);
  }

  uint8_t* window() const override { return window_of(layout().domain_idx); }
  uint64_t* words() const override { return words_of(layout().domain_idx); }
  std::string describe() const override { return "loopback by memcpy"; }
  std::string address() const override {
    return std::to_string(getpid()) + " " + std::to_string(files_[layout().domain_idx]->file());
  }

  void connect(const std::vector<std::string>& addresses, double) override {
    for (int peer = 0; peer < layout().num_domains; ++peer) {
      if (!layout().joins(peer)) continue;
      const std::string& address = addresses[peer];
      const size_t space = address.find(' ');
      if (space == std::string::npos) throw LinkError(peer, "loopback: peer's address is '" + address + "'");
      const std::string path = "/proc/" + address.substr(0, space) + "/fd/" + address.substr(space + 1);
      const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (file < 0) throw LinkError(peer, "loopback: " + path + ": " + std::strerror(errno));
      map(peer, file);
    }
  }

  bool post(const Command& command) override {
    const LinkLayout& at = layout();
    const int me = at.domain_idx, peer = command.peer, ring = command.ring;
    const bool is_put = command.kind == CommandKind::kPut;
    if (is_put && command.num_bytes > 0) {
      std::memcpy(window_of(peer) + at.recv_offset(peer, ring, me, command.slot),
                  window() + at.send_offset(me, ring, peer, command.slot), command.num_bytes);
    }
    const uint32_t word =
        is_put ? at.flag_idx(peer, ring, me, command.slot) : at.credit_idx(peer, ring, me, command.slot);
    __atomic_store_n(words_of(peer) + word, command.word, __ATOMIC_RELEASE);
    return true;
  }

  bool progress() override { return false; }
  bool is_quiet() const override { return true; }

 private:
  size_t file_bytes() const { return layout().window_bytes + sizeof(uint64_t) * layout().num_words; }
  void map(int domain, int file) { files_[domain] = std::make_unique<SharedFile>(file, file_bytes()); }
  uint8_t* window_of(int domain) const { return files_[domain]->memory(); }
  uint64_t* words_of(int domain) const {
    return reinterpret_cast<uint64_t*>(window_of(domain) + layout().window_bytes);
  }

  std::vector<std::unique_ptr<SharedFile>> files_;  // by domain
};

}  // namespace

std::unique_ptr<Link> make_loopback_link(const LinkLayout& layout) { return std::make_unique<LoopbackLink>(layout); }

}  // namespace hybrid_ep
