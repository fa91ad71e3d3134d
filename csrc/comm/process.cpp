#include "comm/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "shardcomm/error.h"

namespace shardcomm {
namespace {

// What proc_pid_stat(5) tells of a process.
struct Stat {
  char state = '?';
  std::uint64_t start = 0;
};

Fd open_stat(const std::string& process) {
  return Fd(open(("/proc/" + process + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
}

// Nothing, with errno: ESRCH if the process is gone.
std::optional<Stat> read_stat(const Fd& fd) {
  std::array<char, 1024> text{};
  const ssize_t bytes = pread(fd.get(), text.data(), text.size() - 1, 0);
  if (bytes < 0) return std::nullopt;
  errno = EINVAL;  // in case this is not what such a file holds
  // The second field is the program's name in parentheses, which may hold anything.
  const std::string_view all(text.data(), static_cast<std::size_t>(bytes));
  const std::size_t name_end = all.rfind(')');
  if (name_end == std::string_view::npos) return std::nullopt;
  std::istringstream fields{std::string(all.substr(name_end + 1))};
  Stat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> stat.start;
  if (!fields) return std::nullopt;
  return stat;
}

}  // namespace

ProcessId ProcessId::own() {
  // Of its first thread, which began when it did: emulators of other processors (qemu-user) answer
  // for /proc/self/stat themselves, with another time than others read in /proc/PID/stat.
  const std::string first_thread = "self/task/" + std::to_string(getpid());
  const Fd file = open_stat(first_thread);
  const std::optional<Stat> stat = file.get() < 0 ? std::nullopt : read_stat(file);
  if (!stat) {
    throw CommError("cannot read /proc/" + first_thread +
                    "/stat, which tells when this process began: " + std::strerror(errno));
  }
  return {getpid(), stat->start};
}

ProcessWatch::ProcessWatch(const ProcessId& process) {
  pidfd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0)));
  const int refusal = pidfd_.get() < 0 ? errno : 0;
  stat_ = open_stat(std::to_string(process.pid));
  const int blindness = stat_.get() < 0 ? errno : 0;
  // Where others' processes are hidden (hidepid), one that is there has no file either.
  if (refusal == ESRCH || (refusal != 0 && blindness == ENOENT)) {
    gone_ = true;
  } else if (refusal != 0 && blindness != 0) {
    throw CommError("cannot tell when process " + std::to_string(process.pid) +
                    " ends: pidfd_open: " + std::strerror(refusal) +
                    ", its /proc/PID/stat: " + std::strerror(blindness));
  } else if (blindness == 0) {
    // Its number may have been given to another before this looked.
    const std::optional<Stat> stat = read_stat(stat_);
    if (!stat && errno != ESRCH) {
      throw CommError("cannot tell when process " + std::to_string(process.pid) +
                      " ends: its /proc/PID/stat: " + std::strerror(errno));
    }
    gone_ = !stat || stat->start != process.start;
    if (refusal == 0) stat_ = Fd();
  }
}

bool ProcessWatch::ended() const {
  if (gone_) return true;
  if (pidfd_.get() >= 0) {
    pollfd end{pidfd_.get(), POLLIN, 0};
    return poll(&end, 1, 0) > 0 && (end.revents & POLLIN) != 0;
  }
  const std::optional<Stat> stat = read_stat(stat_);
  if (!stat) return errno == ESRCH;  // what could not be read now, the next look reads
  return stat->state == 'Z' || stat->state == 'X';
}

}  // namespace shardcomm
