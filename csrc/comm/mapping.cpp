#include "comm/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "comm/available_memory.h"

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

// A signal ends a reservation, and what was reserved by it is given back: a large one would never
// come to its end in a process that a timer interrupts.
constexpr off_t kReservedAtOnce = 4 * 1024 * 1024;

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
  const auto available = reserve ? available_memory() : std::nullopt;
  if (available && bytes > *available) {
    throw CommError("cannot reserve " + std::to_string(bytes) +
                    " bytes of shared memory: " + std::to_string(*available) + " are available");
  }
  if (error == 0) error = ftruncate(fd.get(), size) != 0 ? errno : 0;
  for (off_t done = 0; error == 0 && reserve && done < size; done += kReservedAtOnce) {
    do {
      error = posix_fallocate(fd.get(), done, std::min(kReservedAtOnce, size - done));
    } while (error == EINTR);
  }
  if (error != 0) {
    throw CommError("cannot reserve " + std::to_string(bytes) +
                    " bytes of shared memory: " + std::strerror(error));
  }
  return fd;
}

Fd open_window(int pid, int fd) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  Fd window(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (window.get() >= 0) return window;
  const int error = errno;
  const std::string text =
      "cannot reach the memory of process " + std::to_string(pid) + ": " + std::strerror(error);
  if (error == EMFILE || error == ENFILE || error == ENOMEM) throw CommError(text);
  throw UnreachableError(text +
                         "; it has ended, or its group has (each group needs an id of its own), or "
                         "it runs as another user, in another container or on another host");
}

}  // namespace shardcomm
