#include "comm/available_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace shardcomm {
namespace {

namespace fs = std::filesystem;

// The sum of the numbers after any of `names` in a file of names and numbers; nullopt if none is
// there.
std::optional<std::size_t> sum_of(const fs::path& file, const std::vector<std::string>& names) {
  std::optional<std::size_t> sum;
  std::ifstream lines(file);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string word;
    std::size_t number = 0;
    if (!(words >> word >> number)) continue;
    if (std::find(names.begin(), names.end(), word) != names.end()) sum = sum.value_or(0) + number;
  }
  return sum;
}

// The number that a file consists of; "max" is none.
std::optional<std::size_t> number_in(const fs::path& file) {
  std::size_t number = 0;
  return std::ifstream(file) >> number ? std::optional(number) : std::nullopt;
}

struct Hierarchy {
  fs::path root;
  const char* limit;
  const char* used;
  // In memory.stat: what the kernel takes back before it ends a process, as MemAvailable has it.
  // Shared memory is not among the files there.
  std::vector<std::string> reclaimable;
};

std::optional<std::size_t> smaller(std::optional<std::size_t> a, std::optional<std::size_t> b) {
  return a && b ? std::min(a, b) : (a ? a : b);
}

// What the cgroup `folder` of a hierarchy, and those around it, leave.
std::optional<std::size_t> left_in(const Hierarchy& hierarchy, const fs::path& folder) {
  std::optional<std::size_t> left;
  fs::path group = hierarchy.root;
  const auto look = [&] {
    const auto limit = number_in(group / hierarchy.limit);
    const auto used = number_in(group / hierarchy.used);
    if (!limit || !used) return;
    const std::size_t files = sum_of(group / "memory.stat", hierarchy.reclaimable).value_or(0);
    const std::size_t kept = *used - std::min(*used, files);
    left = smaller(left, *limit - std::min(*limit, kept));
  };
  look();
  for (const fs::path& part : folder.relative_path()) {
    group /= part;
    look();
  }
  return left;
}

}  // namespace

std::optional<std::size_t> available_memory(const fs::path& root) {
  const auto kilobytes = sum_of(root / "proc/meminfo", {"MemAvailable:"});
  std::optional<std::size_t> left = kilobytes ? std::optional(*kilobytes * 1024) : std::nullopt;
  const fs::path mount = root / "sys/fs/cgroup";
  const Hierarchy second{
      mount, "memory.max", "memory.current", {"inactive_file", "active_file", "slab_reclaimable"}};
  const Hierarchy first{mount / "memory",
                        "memory.limit_in_bytes",
                        "memory.usage_in_bytes",
                        {"total_inactive_file", "total_active_file"}};
  // Lines as "0::/folder" (version 2) or "4:memory:/folder" (version 1).
  std::ifstream groups(root / "proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    std::istringstream fields(line);
    std::string number;
    std::string controllers;
    std::string folder;
    std::getline(fields, number, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, folder);
    if (controllers.empty()) left = smaller(left, left_in(second, folder));
    if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      left = smaller(left, left_in(first, folder));
    }
  }
  return left;
}

}  // namespace shardcomm
