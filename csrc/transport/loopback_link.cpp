#include "transport/loopback_link.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/check.h"

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
  LoopbackLink(const LinkLayout& layout, const LoopbackMemory& memory)
      : Link(layout), windows_(layout.num_domains), words_(layout.num_domains) {
    if (memory.windows.empty()) {
      const int file = memfd_create("hybrid_ep_loopback", MFD_CLOEXEC);
      if (file < 0 || ftruncate(file, static_cast<off_t>(file_bytes())) != 0) {
        throw LinkError(-1, std::string("loopback: memfd_create: ") + std::strerror(errno));
      }
      files_.resize(layout.num_domains);
      map(layout.domain_idx, file);
      return;
    }
    const auto num = static_cast<size_t>(layout.num_domains);
    require(memory.windows.size() == num, "number of windows", memory.windows.size(), "one for each domain");
    require(memory.words.size() == num, "number of words", memory.words.size(), "one for each domain");
    for (size_t i = 0; i < num; ++i) {
      windows_[i] = reinterpret_cast<uint8_t*>(memory.windows[i]);
      words_[i] = reinterpret_cast<uint64_t*>(memory.words[i]);
    }
  }

  uint8_t* window() const override { return windows_[layout().domain_idx]; }
  uint64_t* words() const override { return words_[layout().domain_idx]; }
  std::string describe() const override {
    return std::string("loopback by ") + (queue_ ? queue_->describe() : "copies");
  }

  std::string address() const override {
    if (files_.empty()) return "mapped";
    return std::to_string(getpid()) + " " + std::to_string(files_[layout().domain_idx]->file());
  }

  void connect(const std::vector<std::string>& addresses, double) override {
    for (int peer = 0; peer < layout().num_domains && !files_.empty(); ++peer) {
      if (peer == layout().domain_idx) continue;
      const std::string& address = addresses[peer];
      const size_t space = address.find(' ');
      if (space == std::string::npos) throw LinkError(peer, "loopback: peer's address is '" + address + "'");
      const std::string path = "/proc/" + address.substr(0, space) + "/fd/" + address.substr(space + 1);
      const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (file < 0) throw LinkError(peer, "loopback: " + path + ": " + std::strerror(errno));
      map(peer, file);
    }
    queue_ = make_copy_queue();
  }

  bool post(const Command& command) override {
    const LinkLayout& at = layout();
    const int me = at.domain_idx, peer = command.peer, ring = command.ring;
    if (command.kind == CommandKind::kCredit) {
      return queue_->copy(nullptr, nullptr, 0, words_[peer] + at.credit_idx(peer, ring, me, command.slot),
                          command.word);
    }
    return queue_->copy(windows_[peer] + at.recv_offset(peer, ring, me, command.slot),
                        window() + at.send_offset(me, ring, peer, command.slot), command.num_bytes,
                        words_[peer] + at.flag_idx(peer, ring, me, command.slot), command.word);
  }

  bool progress() override {
    try {
      return queue_->progress();
    } catch (const std::runtime_error& error) {
      fail(-1, "loopback", error.what());
      return false;
    }
  }
  bool is_quiet() const override { return queue_->is_quiet(); }

 private:
  size_t file_bytes() const { return layout().window_bytes + sizeof(uint64_t) * layout().num_words; }

  void map(int domain, int file) {
    files_[domain] = std::make_unique<SharedFile>(file, file_bytes());
    windows_[domain] = files_[domain]->memory();
    words_[domain] = reinterpret_cast<uint64_t*>(windows_[domain] + layout().window_bytes);
  }

  std::vector<std::unique_ptr<SharedFile>> files_;
  std::vector<uint8_t*> windows_;
  std::vector<uint64_t*> words_;
  std::unique_ptr<CopyQueue> queue_;
};

}  // namespace

std::unique_ptr<Link> make_loopback_link(const LinkLayout& layout, const LoopbackMemory& memory) {
  return std::make_unique<LoopbackLink>(layout, memory);
}

}  // namespace hybrid_ep
