// `shm`: processes of one host. All memory is anonymous (memfd) and found through rank 0's process,
// so nothing has a name that could be left behind.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/board_communicator.h"
#include "comm/inspect.h"
#include "comm/process.h"

namespace shardcomm {
namespace {

class ShmProvider final : public WindowProvider {
 public:
  explicit ShmProvider(const GroupMemory* group) : group_(group) {}

  std::shared_ptr<void> create(std::size_t bytes, std::uint64_t* handle) override {
    auto made = std::make_shared<Fd>(create_window(bytes, /*reserve=*/true));
    *handle = static_cast<std::uint64_t>(made->get());
    return made;
  }
  std::shared_ptr<Mapping> open(std::uint64_t handle, std::size_t bytes) override {
    const Fd fd = open_window(group_->ranks[0].pid.load(), static_cast<int>(handle));
    return Mapping::of_file(fd.get(), bytes, /*populate=*/true);
  }
  bool shares_addresses() const override { return false; }

 private:
  const GroupMemory* group_;
};

// Control memory whose descriptor stays open with it: through that, others find and read it.
std::shared_ptr<Mapping> map_findable(Fd fd, std::size_t bytes) {
  struct Held {
    Fd fd;
    std::shared_ptr<Mapping> mapping;
  };
  auto mapping = Mapping::of_file(fd.get(), bytes, /*populate=*/false);
  auto held = std::make_shared<Held>(Held{std::move(fd), std::move(mapping)});
  return {held, held->mapping.get()};
}

// Which rank's process has ended.
class Processes {
 public:
  Processes(const GroupMemory* group, int rank, int size)
      : group_(group), rank_(rank), watches_(static_cast<std::size_t>(size)) {}

  // Begins to watch those that are known and not watched yet: all, once all have attached. Throws
  // CommError if one cannot be. Not while another thread looks.
  void watch() {
    for (int r = 0; r < static_cast<int>(watches_.size()); ++r) {
      const GroupMemory::Rank& posted = group_->ranks[r];
      const std::int32_t pid = posted.pid.load();
      if (r == rank_ || pid == 0 || watches_[static_cast<std::size_t>(r)]) continue;
      watches_[static_cast<std::size_t>(r)].emplace(ProcessId{pid, posted.start.load()});
    }
  }

  bool has_ended(int rank) const {
    const auto& watch = watches_[static_cast<std::size_t>(rank)];
    return watch && watch->ended();
  }

 private:
  const GroupMemory* group_;
  int rank_;
  std::vector<std::optional<ProcessWatch>> watches_;
};

}  // namespace

struct ShmSession::State {
  int size;
  Fd fd;
};

namespace {

// Where a process keeps a group's memory. The number of a descriptor that was closed is given
// again; the file's own number tells which group's it was.
struct Address {
  int pid = 0;
  int fd = 0;
  unsigned long long file = 0;

  std::string text() const {
    return std::to_string(pid) + ":" + std::to_string(fd) + ":" + std::to_string(file);
  }
};

unsigned long long file_number(const Fd& fd) {
  struct stat file{};
  if (fstat(fd.get(), &file) != 0) {
    throw CommError(std::string("shm: cannot read the group's memory: ") + std::strerror(errno));
  }
  return file.st_ino;
}

}  // namespace

ShmSession::ShmSession(int size, const std::vector<ProcessId>& processes)
    : state_(std::make_unique<State>(State{size, Fd()})) {
  if (size < 1) {
    throw std::invalid_argument("shm: size is " + std::to_string(size) + "; it must be at least 1");
  }
  if (!processes.empty() && processes.size() != static_cast<std::size_t>(size)) {
    throw std::invalid_argument("shm: processes has " + std::to_string(processes.size()) +
                                " entries; it must have one for each of the " +
                                std::to_string(size) + " ranks, or none");
  }
  const std::size_t bytes = ControlMemory::bytes(size);
  state_->fd = create_window(bytes, /*reserve=*/false, kGroupLabel);
  const auto control = Mapping::of_file(state_->fd.get(), bytes, /*populate=*/false);
  GroupMemory* group = ControlMemory::group(control->data());
  for (std::size_t r = 0; r < processes.size(); ++r) {
    group->ranks[r].start.store(processes[r].start);
    group->ranks[r].pid.store(processes[r].pid);
  }
  mark_readable(*group, size);
}

ShmSession::~ShmSession() = default;

std::string ShmSession::address() const {
  return Address{getpid(), state_->fd.get(), file_number(state_->fd)}.text();
}

bool ShmSession::is_complete() const {
  const auto control = Mapping::of_file(state_->fd.get(), ControlMemory::bytes(state_->size),
                                        /*populate=*/false);
  const GroupMemory::Rank* ranks = ControlMemory::group(control->data())->ranks;
  return std::all_of(ranks, ranks + state_->size,
                     [](const auto& rank) { return rank.attached.load() != 0; });
}

struct ShmMember::State {
  std::string address;
  int rank;
  int size;
  std::shared_ptr<Mapping> control;
};

ShmMember::ShmMember(const std::string& address, int rank, int size) {
  Address at;
  if (std::sscanf(address.c_str(), "%d:%d:%llu", &at.pid, &at.fd, &at.file) != 3) {
    throw std::invalid_argument("shm: address is '" + address +
                                "'; it must be that of a ShmSession");
  }
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("shm: rank is " + std::to_string(rank) + "; it must be 0 to " +
                                std::to_string(size - 1));
  }
  Fd fd = open_window(at.pid, at.fd);
  int ranks = 0;
  try {
    if (file_number(fd) != at.file) {
      throw CommError(
          "the group has connected already, or has ended, and each group needs an id of its own");
    }
    ranks = read_size(fd.get());
  } catch (const CommError& error) {
    throw CommError("shm: rank " + std::to_string(rank) + " cannot attach at " + address + ": " +
                    error.what());
  }
  if (ranks != size) {
    throw CommError("shm: size is " + std::to_string(size) + "; the group at " + address + " has " +
                    std::to_string(ranks) + " ranks");
  }
  state_ = std::make_unique<State>(
      State{address, rank, size, map_findable(std::move(fd), ControlMemory::bytes(size))});
}

ShmMember::ShmMember(ShmMember&&) noexcept = default;
ShmMember::~ShmMember() = default;

std::shared_ptr<Communicator> ShmMember::attach(const CommOptions& options) {
  const auto [address, rank, size, control] = *state_;
  GroupMemory* group = ControlMemory::group(control->data());
  GroupMemory::Rank& own = group->ranks[rank];
  std::uint32_t nobody = 0;
  if (!own.attached.compare_exchange_strong(nobody, 1)) {
    throw CommError("shm: rank " + std::to_string(rank) + " of " + address +
                    " is taken by process " + std::to_string(own.pid.load()) +
                    "; each process needs a rank of its own, and each group an id of its own");
  }
  std::shared_ptr<Processes> processes;
  std::shared_ptr<BoardCommunicator> communicator;
  try {
    processes = std::make_shared<Processes>(group, rank, size);
    communicator = std::make_shared<BoardCommunicator>(
        "shm", rank, size, options, control, std::make_unique<ShmProvider>(group),
        make_host_executor(), [processes](int of) { return processes->has_ended(of); });
    const ProcessId process = ProcessId::own();
    own.start.store(process.start);
    own.pid.store(process.pid);  // last: who sees it reads the start
    processes->watch();          // those that the session knows
  } catch (const std::exception& error) {
    // The others would wait.
    Group(group, ControlMemory::boards(control->data(), size), rank, size, options.deadline_s, {})
        .abort(error.what());
    throw;
  }
  communicator->attach([&] { processes->watch(); });
  return communicator;
}

std::shared_ptr<Communicator> make_shm(const std::string& address, int rank, int size,
                                       const CommOptions& options) {
  return ShmMember(address, rank, size).attach(options);
}

}  // namespace shardcomm
