// `shm`: processes of one host. All memory is anonymous (memfd) and found through rank 0's process,
// so nothing has a name that could be left behind.
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/board_communicator.h"

namespace shardcomm {
namespace {

class ShmProvider final : public WindowProvider {
 public:
  explicit ShmProvider(const GroupMemory* group) : group_(group) {}

  std::uint64_t create(std::size_t bytes) override {
    made_ = create_window(bytes, /*reserve=*/true);
    return static_cast<std::uint64_t>(made_.get());
  }
  std::shared_ptr<Mapping> open(std::uint64_t handle, std::size_t bytes) override {
    const Fd fd = open_window(group_->ranks[0].pid.load(), static_cast<int>(handle));
    return Mapping::of_file(fd.get(), bytes, /*populate=*/true);
  }
  void forget(std::uint64_t) noexcept override { made_ = Fd(); }
  bool shares_addresses() const override { return false; }

 private:
  const GroupMemory* group_;
  Fd made_;
};

// Tells which rank's process has ended, through descriptors that stay with a process whatever
// becomes of its number.
class Processes {
 public:
  Processes(const GroupMemory* group, int rank, int size)
      : group_(group), rank_(rank), fds_(size) {}

  int find_dead() {
    for (int r = 0; r < static_cast<int>(fds_.size()); ++r) {
      if (r != rank_ && is_dead(r)) return r;
    }
    return -1;
  }

 private:
  bool is_dead(int r) {
    if (fds_[r].get() < 0) {
      const std::int32_t pid = group_->ranks[r].pid.load();
      if (pid == 0) return false;  // not attached yet
      fds_[r] = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
      if (fds_[r].get() < 0) return errno == ESRCH;
    }
    pollfd ended{fds_[r].get(), POLLIN, 0};
    return poll(&ended, 1, 0) > 0;
  }

  const GroupMemory* group_;
  int rank_;
  std::vector<Fd> fds_;
};

}  // namespace

struct ShmSession::State {
  Fd fd;
};

ShmSession::ShmSession(int size) : state_(std::make_unique<State>()) {
  if (size < 1) {
    throw std::invalid_argument("shm: size is " + std::to_string(size) + "; it must be at least 1");
  }
  state_->fd = create_window(ControlMemory::bytes(size), /*reserve=*/false);
}

ShmSession::~ShmSession() = default;

std::string ShmSession::address() const {
  return std::to_string(getpid()) + ":" + std::to_string(state_->fd.get());
}

std::shared_ptr<Communicator> make_shm(const std::string& address, int rank, int size,
                                       const CommOptions& options) {
  int pid = 0;
  int session_fd = 0;
  if (std::sscanf(address.c_str(), "%d:%d", &pid, &session_fd) != 2) {
    throw std::invalid_argument("shm: address is '" + address +
                                "'; it must be that of a ShmSession");
  }
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("shm: rank is " + std::to_string(rank) + "; it must be 0 to " +
                                std::to_string(size - 1));
  }
  const Fd fd = open_window(pid, session_fd);
  const off_t bytes = lseek(fd.get(), 0, SEEK_END);
  if (bytes != static_cast<off_t>(ControlMemory::bytes(size))) {
    throw CommError("shm: the group at " + address + " is not one of " + std::to_string(size) +
                    " ranks");
  }
  const auto control = Mapping::of_file(fd.get(), ControlMemory::bytes(size), /*populate=*/false);
  GroupMemory* group = ControlMemory::group(control->data());
  std::int32_t nobody = 0;
  if (!group->ranks[rank].pid.compare_exchange_strong(nobody, getpid())) {
    throw CommError("shm: rank " + std::to_string(rank) + " of " + address +
                    " is taken by process " + std::to_string(nobody));
  }
  auto processes = std::make_shared<Processes>(group, rank, size);
  auto communicator = std::make_shared<BoardCommunicator>(
      "shm", rank, size, options, control, std::make_unique<ShmProvider>(group),
      make_host_executor(), [processes] { return processes->find_dead(); });
  communicator->attach();
  return communicator;
}

}  // namespace shardcomm
