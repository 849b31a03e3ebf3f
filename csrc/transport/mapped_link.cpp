#include "transport/mapped_link.h"

#include <algorithm>
#include <string>

#include "common/check.h"
#include "transport/paced_link.h"

namespace hybrid_ep {
namespace {

class MappedWindows : public Link {
 public:
  MappedWindows(const LinkLayout& layout, const std::vector<uintptr_t>& windows, std::string description)
      : Link(layout), description_(std::move(description)) {
    require(windows.size() == static_cast<size_t>(layout.num_domains), "number of windows", windows.size(),
            "one for each domain");
    for (const uintptr_t window : windows) windows_.push_back(reinterpret_cast<uint8_t*>(window));
  }

  uint8_t* window() const override { return windows_[layout().domain_idx]; }
  uint64_t* words() const override { return reinterpret_cast<uint64_t*>(window() + layout().window_bytes); }
  std::vector<uint8_t*> mapped_windows() const override { return windows_; }
  std::string describe() const override { return description_; }
  std::string address() const override { return "mapped"; }
  void connect(const std::vector<std::string>&, double) override {}

  bool post(const Command&) override {
    fail(-1, description_, "a kernel has given a command, although it writes its peers' windows itself");
    return true;
  }
  bool progress() override { return false; }
  bool is_quiet() const override { return true; }

 private:
  std::vector<uint8_t*> windows_;
  std::string description_;
};

class LoopbackWindows final : public MappedWindows {
 public:
  LoopbackWindows(const LinkLayout& layout, const std::vector<uintptr_t>& windows, double gbytes_per_s)
      : MappedWindows(layout, windows, "loopback by stores of the kernels" + with_rate(gbytes_per_s)),
        gbytes_per_s_(gbytes_per_s) {}

  double gbytes_per_s() const override { return gbytes_per_s_; }

 private:
  const double gbytes_per_s_;
};

class NvshmemWindows final : public MappedWindows {
 public:
  NvshmemWindows(const LinkLayout& layout, const std::vector<uintptr_t>& windows, const std::vector<int>& pes)
      : MappedWindows(layout, windows, count_mapped(layout, windows)), pes_(pes) {
    require(window() != nullptr, "own window", 0, "an address");
    require(pes.size() == static_cast<size_t>(layout.num_domains), "number of PEs", pes.size(), "one for each domain");
  }

  std::vector<int> pes() const override { return pes_; }

 private:
  static std::string count_mapped(const LinkLayout& layout, const std::vector<uintptr_t>& windows) {
    const auto num_mapped = static_cast<int>(windows.size() - std::count(windows.begin(), windows.end(), 0)) - 1;
    return "NVSHMEM, " + std::to_string(num_mapped) + " of " + std::to_string(layout.num_domains - 1) + " peers mapped";
  }

  std::vector<int> pes_;
};

}  // namespace

std::unique_ptr<Link> make_mapped_link(const LinkLayout& layout, const std::vector<uintptr_t>& windows,
                                       double gbytes_per_s) {
  return std::make_unique<LoopbackWindows>(layout, windows, gbytes_per_s);
}

std::unique_ptr<Link> make_nvshmem_link(const LinkLayout& layout, const std::vector<uintptr_t>& windows,
                                        const std::vector<int>& pes) {
  return std::make_unique<NvshmemWindows>(layout, windows, pes);
}

}  // namespace hybrid_ep
