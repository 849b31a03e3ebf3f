#include "topology/sysfs.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>

#include "topology/text.h"

namespace hybrid_ep::topology {
namespace {

namespace fs = std::filesystem;

constexpr int kNvidia = 0x10de;
constexpr int kBaseClassNetwork = 0x02;
constexpr int kClassVga = 0x0300;
constexpr int kClass3d = 0x0302;
constexpr int kClassBridge = 0x0604;

// The first line of a file without its newline, or an empty string. Only regular files are read, and only their
// beginning: a FIFO would block, and a device could do anything.
std::string read_line(const fs::path& file) {
  const int descriptor = open(file.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) return {};
  struct stat status{};
  char buffer[4096];
  const bool regular = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  const ssize_t length = regular ? read(descriptor, buffer, sizeof buffer) : 0;
  close(descriptor);
  const std::string content(buffer, length > 0 ? static_cast<size_t>(length) : 0);
  return printable(content.substr(0, content.find('\n')));
}

// The number a file holds ("0x10de", "-1", "400"), or `otherwise`.
int read_int(const fs::path& file, int otherwise) {
  const std::string line = read_line(file);
  char* end = nullptr;
  const long value = std::strtol(line.c_str(), &end, 0);
  return end == line.c_str() ? otherwise : static_cast<int>(value);
}

// Entries of a directory by name; none where it is missing or closed to us. A name that is not printable is no device.
std::vector<std::string> list(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (name == printable(name)) names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Whether a sorts before b, with runs of digits compared as numbers.
bool natural_less(const std::string& a, const std::string& b) {
  size_t i = 0;
  size_t j = 0;
  const auto digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
  while (i < a.size() && j < b.size()) {
    if (digit(a[i]) && digit(b[j])) {
      size_t i_end = i;
      size_t j_end = j;
      while (i_end < a.size() && digit(a[i_end])) ++i_end;
      while (j_end < b.size() && digit(b[j_end])) ++j_end;
      const long left = std::strtol(a.substr(i, i_end - i).c_str(), nullptr, 10);
      const long right = std::strtol(b.substr(j, j_end - j).c_str(), nullptr, 10);
      if (left != right) return left < right;
      i = i_end;
      j = j_end;
    } else {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i;
      ++j;
    }
  }
  return a.size() - i < b.size() - j;
}

// The chain of bridges above a device: the parts of the path that its link resolves to, from the host bridge on.
std::vector<std::string> bridges_above(const fs::path& link, const std::string& address) {
  std::error_code error;
  const fs::path resolved = fs::canonical(link, error);
  std::vector<std::string> chain;
  bool below_host_bridge = false;
  for (const fs::path& part : resolved) {
    below_host_bridge = below_host_bridge || part.string().rfind("pci", 0) == 0;
    if (below_host_bridge) chain.push_back(printable(part.string()));
  }
  if (chain.empty()) chain.push_back(address);
  return chain;
}

// "4: ACTIVE" → "ACTIVE".
std::string after_colon(const std::string& text) {
  const size_t colon = text.find(": ");
  return colon == std::string::npos ? text : text.substr(colon + 2);
}

// A number that cannot be negative or infinite; 0 where there is none ("Unknown", as of a virtual function).
double read_amount(const fs::path& file) {
  const double value = std::strtod(read_line(file).c_str(), nullptr);
  return std::isfinite(value) && value > 0 && value < 1e9 ? value : 0;
}

PciLink read_link(const fs::path& device) {
  const auto width = [&](const char* name) {
    const int lanes = static_cast<int>(read_amount(device / name));
    return lanes <= 32 ? lanes : 0;  // a port without a link reports 63 or 255
  };
  return {width("current_link_width"), width("max_link_width"), read_amount(device / "current_link_speed"),
          read_amount(device / "max_link_speed")};
}

NicPort read_port(const fs::path& directory, int port) {
  NicPort result;
  result.port = port;
  result.state = after_colon(read_line(directory / "state"));
  result.phys_state = after_colon(read_line(directory / "phys_state"));
  result.link_layer = read_line(directory / "link_layer");
  result.rate_gbps = read_amount(directory / "rate");  // "400 Gb/sec (4X NDR)"
  result.sm_lid = read_int(directory / "sm_lid", -1);
  return result;
}

}  // namespace

bool is_gpu(const PciDevice& device) {
  return device.vendor == kNvidia && (device.class_code == kClassVga || device.class_code == kClass3d);
}

bool is_bridge(const PciDevice& device) { return device.class_code == kClassBridge; }

std::vector<PciDevice> scan_pci(const fs::path& sysroot) {
  const fs::path devices = sysroot / "sys/bus/pci/devices";
  std::vector<PciDevice> result;
  for (const std::string& address : list(devices)) {
    const fs::path device = devices / address;
    PciDevice found;
    found.address = address;
    found.vendor = read_int(device / "vendor", -1);
    const int full_class = read_int(device / "class", -1);
    found.class_code = full_class < 0 ? -1 : full_class >> 8;  // the low byte is the programming interface
    const int base_class = found.class_code >> 8;
    const bool unknown_gpu = found.vendor == kNvidia && full_class < 0;  // listed, so that it does not count as missing
    if (!is_gpu(found) && !is_bridge(found) && base_class != kBaseClassNetwork && !unknown_gpu) continue;
    found.device_id = read_int(device / "device", -1);
    found.numa_node = read_int(device / "numa_node", kUnreadable);
    found.link = read_link(device);
    found.path = bridges_above(device, address);
    result.push_back(std::move(found));
  }
  return result;
}

std::vector<Nic> scan_nics(const fs::path& sysroot) {
  const fs::path devices = sysroot / "sys/class/infiniband";
  std::vector<std::string> names = list(devices);
  std::sort(names.begin(), names.end(), natural_less);
  std::vector<Nic> result;
  for (const std::string& name : names) {
    const fs::path device = devices / name;
    Nic nic;
    nic.name = name;
    nic.node_guid = read_line(device / "node_guid");
    nic.firmware = read_line(device / "fw_ver");
    std::error_code error;
    const fs::path function = fs::canonical(device / "device", error);
    // A software device hangs below a network device or nothing at all, not below a PCI function.
    if (!error && fs::exists(function / "vendor", error)) {
      nic.pci_address = printable(function.filename().string());
      nic.numa_node = read_int(function / "numa_node", kUnreadable);
      nic.netdevs = list(function / "net");
    }
    for (const std::string& port : list(device / "ports")) {
      nic.ports.push_back(read_port(device / "ports" / port, std::atoi(port.c_str())));
    }
    result.push_back(std::move(nic));
  }
  return result;
}

std::map<int, std::string> scan_numa_nodes(const fs::path& sysroot) {
  const fs::path folder = sysroot / "sys/devices/system/node";
  std::map<int, std::string> nodes;
  for (const std::string& name : list(folder)) {
    if (name.size() > 4 && name.size() < 10 && name.rfind("node", 0) == 0 &&
        std::isdigit(static_cast<unsigned char>(name[4]))) {
      nodes[std::atoi(name.c_str() + 4)] = read_line(folder / name / "cpulist");
    }
  }
  return nodes;
}

}  // namespace hybrid_ep::topology
