#include "comm/mapping.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "shardcomm/error.h"

namespace shardcomm {
namespace {

std::byte* map_pages(std::size_t bytes, int flags, int fd) {
  void* data = mmap(nullptr, std::max<std::size_t>(bytes, 1), PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) {
    throw CommError("cannot map " + std::to_string(bytes) +
                    " bytes of communication memory: " + std::strerror(errno));
  }
  return static_cast<std::byte*>(data);
}

class Pages final : public Mapping {
 public:
  Pages(std::size_t bytes, int flags, int fd) : Mapping(map_pages(bytes, flags, fd), bytes) {}
  ~Pages() override { munmap(data(), std::max<std::size_t>(bytes(), 1)); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
};

// What could be taken without driving other programs out of memory; 0 if nobody says.
std::size_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string name;
  std::size_t kilobytes = 0;
  std::string unit;
  while (meminfo >> name >> kilobytes >> unit) {
    if (name == "MemAvailable:") return kilobytes * 1024;
  }
  return 0;
}

// An errno. In older kernels any signal ends the call, which gives back the pages it has; where
// signals come at short intervals it would never succeed.
int reserve_pages(int fd, off_t bytes) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = posix_fallocate(fd, 0, bytes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

}  // namespace

std::shared_ptr<Mapping> Mapping::anonymous(std::size_t bytes) {
  return std::make_shared<Pages>(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

std::shared_ptr<Mapping> Mapping::of_file(int fd, std::size_t bytes, bool populate) {
  return std::make_shared<Pages>(bytes, MAP_SHARED | (populate ? MAP_POPULATE : 0), fd);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Fd create_window(std::size_t bytes, bool reserve, const char* label) {
  Fd fd(memfd_create(label, MFD_CLOEXEC));
  const auto size = static_cast<off_t>(std::max<std::size_t>(bytes, 1));
  int error = fd.get() < 0 ? errno : 0;
  // The kernel would grant it page by page, and end a process of its choice when it cannot.
  const std::size_t available = reserve ? available_bytes() : 0;
  if (available > 0 && bytes > available) {
    throw CommError("cannot reserve " + std::to_string(bytes) +
                    " bytes of shared memory: " + std::to_string(available) + " are available");
  }
  if (error == 0) error = ftruncate(fd.get(), size) != 0 ? errno : 0;
  if (error == 0 && reserve) error = reserve_pages(fd.get(), size);
  if (error != 0) {
    throw CommError("cannot reserve " + std::to_string(bytes) +
                    " bytes of shared memory: " + std::strerror(error));
  }
  return fd;
}

Fd open_window(int pid, int fd) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  Fd window(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (window.get() < 0) {
    throw CommError("cannot reach the memory of process " + std::to_string(pid) + ": " +
                    std::strerror(errno) +
                    "; it has ended, or runs as another user or in another container");
  }
  return window;
}

}  // namespace shardcomm
