// What memory a process may still take, of files like those of Linux and of the machine's own.
#include "comm/available_memory.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>

namespace {

namespace fs = std::filesystem;

// A folder that goes away.
class Root {
 public:
  explicit Root(const std::map<std::string, std::string>& files) {
    std::string name = fs::temp_directory_path() / "available_memory_XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path = name;
    for (const auto& [file, text] : files) {
      fs::create_directories((path / file).parent_path());
      std::ofstream(path / file) << text;
    }
  }
  ~Root() { fs::remove_all(path); }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;

  fs::path path;
};

void expect(const char* what, const std::map<std::string, std::string>& files,
            std::optional<std::size_t> bytes) {
  const Root root(files);
  const auto found = shardcomm::available_memory(root.path);
  if (found == bytes) return;
  std::printf("%s: %zu and not %zu\n", what, found.value_or(0), bytes.value_or(0));
  std::exit(1);
}

}  // namespace

int main() {
  const std::string meminfo = "MemTotal:  24000 kB\nMemFree:  1000 kB\nMemAvailable:  9000 kB\n";
  constexpr std::size_t kAll = 9000 * 1024;
  const std::string second = "sys/fs/cgroup/";
  const std::string first = "sys/fs/cgroup/memory/";

  expect("nobody says", {}, std::nullopt);
  expect("the machine", {{"proc/meminfo", meminfo}}, kAll);
  expect("no limit",
         {{"proc/meminfo", meminfo},
          {"proc/self/cgroup", "0::/job\n"},
          {second + "job/memory.max", "max\n"},
          {second + "job/memory.current", "5000\n"}},
         kAll);
  expect("a container that sees its own cgroup as the root",
         {{"proc/meminfo", meminfo},
          {"proc/self/cgroup", "0::/\n"},
          {second + "memory.max", "10000\n"},
          {second + "memory.current", "7000\n"},
          {second + "memory.stat",
           "anon 5000\nfile 1900\nshmem 50\nactive_file 500\ninactive_file 1300\nslab_reclaimable "
           "100\n"}},
         10000 - (7000 - 1900));
  expect("the group around it has less left",
         {{"proc/meminfo", meminfo},
          {"proc/self/cgroup", "0::/job/step\n"},
          {second + "job/memory.max", "10000\n"},
          {second + "job/memory.current", "9000\n"},
          {second + "job/step/memory.max", "8000\n"},
          {second + "job/step/memory.current", "1000\n"}},
         1000);
  expect("over its limit",
         {{"proc/self/cgroup", "0::/job\n"},
          {second + "job/memory.max", "1000\n"},
          {second + "job/memory.current", "2000\n"}},
         std::size_t{0});
  expect("version 1, whose folder a container does not see",
         {{"proc/meminfo", meminfo},
          {"proc/self/cgroup", "4:cpu,memory:/docker/1a2b\n3:pids:/other\n0::/\n"},
          {first + "memory.limit_in_bytes", "6000\n"},
          {first + "memory.usage_in_bytes", "3000\n"},
          {first + "memory.stat",
           "inactive_file 1\ntotal_inactive_file 800\ntotal_active_file 100\n"}},
         6000 - (3000 - 900));

  const auto here = shardcomm::available_memory();
  if (!here || *here == 0) {
    std::puts("nothing is available on this machine");
    return 1;
  }
  std::puts("ok");
  return 0;
}
