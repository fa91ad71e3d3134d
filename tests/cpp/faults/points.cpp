#include "faults/points.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <new>

#include "comm/board.h"

namespace faults {
namespace {

constexpr useconds_t kDelay_us = 80'000;  // others look for trouble after 50 ms

std::atomic<Report*> armed{nullptr};
Fault chosen;
std::atomic<int> points{0};
std::atomic<const char*> failing{nullptr};  // every call of this name, with `failing_errno`
int failing_errno = 0;

// One call. What it does to the process it does in its constructor and its destructor.
class Point {
 public:
  Point(const char* name, std::initializer_list<int> errors) {
    Report* report = armed.load();
    if (report == nullptr) return;
    if (errors.size() > 0 && failing.load() == name) error_ = failing_errno;
    if (points.fetch_add(1) + 1 != chosen.point) return;
    std::snprintf(report->name, sizeof report->name, "%s", name);
    report->errors.store(static_cast<int>(errors.size()));
    report->reached.store(true);
    const bool fails = chosen.kind == Kind::error || chosen.kind == Kind::error_on;
    if (fails && static_cast<std::size_t>(chosen.error) >= errors.size()) return;
    report->fired_ns.store(now_ns());
    report->fired.store(true);
    if (fails) {
      error_ = *(errors.begin() + chosen.error);
      report->leaks.store(report->leaks.load() || std::strcmp(name, "munmap") == 0);
      report->interrupted.store(error_ == EINTR);
      failing_errno = error_;
      // No signal comes for ever.
      if (chosen.kind == Kind::error_on && error_ != EINTR) failing.store(name);
    }
    if (chosen.kind == Kind::kill) raise_at_once(SIGKILL);
    if (chosen.kind == Kind::stop) raise_at_once(SIGSTOP);
    if (chosen.kind == Kind::delay) usleep(kDelay_us);
    if (chosen.kind == Kind::kill_after) after_ = SIGKILL;
    if (chosen.kind == Kind::stop_after) after_ = SIGSTOP;
  }
  ~Point() {
    if (after_ == 0) return;
    const int error = errno;
    raise_at_once(after_);
    errno = error;
  }
  Point(const Point&) = delete;
  Point& operator=(const Point&) = delete;

  int error() const { return error_; }  // 0: make the call

  template <class Result>
  Result fail(Result result) const {
    errno = error_;
    return result;
  }

 private:
  static void raise_at_once(int signal) { kill(getpid(), signal); }

  int error_ = 0;
  int after_ = 0;
};

// The function that stands behind ours: libc's, or a sanitizer's. clang links its sanitizers into
// the executable, where ours replace theirs, which are then found by their second name alone.
template <class Function>
Function* behind(const char* name) {
  std::array<char, 64> second_name{};
  std::snprintf(second_name.data(), second_name.size(), "__interceptor_%s", name);
  void* found = dlsym(RTLD_DEFAULT, second_name.data());
  if (found == nullptr) found = dlsym(RTLD_NEXT, name);
  return reinterpret_cast<Function*>(found);
}

}  // namespace

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void arm(const Fault& fault, Report* report) {
  chosen = fault;
  points.store(0);
  armed.store(report);
}

void disarm() {
  armed.store(nullptr);
  failing.store(nullptr);
}

}  // namespace faults

using faults::behind;
using faults::Point;

// An executable's functions come before those of the libraries that it is linked with.
extern "C" {

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  static const auto real = behind<void*(void*, size_t, int, int, int, off_t)>("mmap");
  const Point point("mmap", {ENOMEM, EAGAIN});
  if (point.error() != 0) return point.fail(MAP_FAILED);
  return real(at, bytes, protection, flags, fd, offset);
}

int munmap(void* at, size_t bytes) noexcept {
  static const auto real = behind<int(void*, size_t)>("munmap");
  const Point point("munmap", {ENOMEM});
  if (point.error() != 0) return point.fail(-1);
  return real(at, bytes);
}

int memfd_create(const char* name, unsigned flags) noexcept {
  static const auto real = behind<int(const char*, unsigned)>("memfd_create");
  const Point point("memfd_create", {EMFILE, ENFILE, ENOMEM, ENOSYS});
  if (point.error() != 0) return point.fail(-1);
  return real(name, flags);
}

int ftruncate(int fd, off_t bytes) noexcept {
  static const auto real = behind<int(int, off_t)>("ftruncate");
  const Point point("ftruncate", {ENOSPC, EFBIG});
  if (point.error() != 0) return point.fail(-1);
  return real(fd, bytes);
}

int posix_fallocate(int fd, off_t offset, off_t bytes) {
  static const auto real = behind<int(int, off_t, off_t)>("posix_fallocate");
  const Point point("posix_fallocate", {ENOSPC, EINTR, ENOMEM});
  if (point.error() != 0) return point.error();
  return real(fd, offset, bytes);
}

int open(const char* path, int flags, ...) {
  static const auto real = behind<int(const char*, int, ...)>("open");
  std::va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  const Point point("open", {EMFILE, ENFILE, ENOMEM, EACCES, ENOENT});
  if (point.error() != 0) return point.fail(-1);
  return real(path, flags, mode);
}

int close(int fd) {
  static const auto real = behind<int(int)>("close");
  const Point point("close", {EINTR, EIO});
  const int result = real(fd);  // it is closed also if it says that it was interrupted
  return point.error() != 0 ? point.fail(-1) : result;
}

off_t lseek(int fd, off_t offset, int whence) noexcept {
  static const auto real = behind<off_t(int, off_t, int)>("lseek");
  const Point point("lseek", {EBADF});
  if (point.error() != 0) return point.fail(off_t{-1});
  return real(fd, offset, whence);
}

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  static const auto real = behind<ssize_t(int, void*, size_t, off_t)>("pread");
  const Point point("pread", {EIO, ENOMEM});
  if (point.error() != 0) return point.fail(ssize_t{-1});
  return real(fd, to, bytes, offset);
}

int poll(pollfd* fds, nfds_t count, int timeout) {
  static const auto real = behind<int(pollfd*, nfds_t, int)>("poll");
  const Point point("poll", {EINTR, ENOMEM});
  if (point.error() != 0) return point.fail(-1);
  return real(fds, count, timeout);
}

// The core's own calls of the kernel: futex and pidfd_open.
long syscall(long number, ...) noexcept {
  static const auto real = behind<long(long, ...)>("syscall");
  std::va_list arguments;
  va_start(arguments, number);
  std::array<long, 6> a{};
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  const auto call = [&](const char* name, std::initializer_list<int> errors) {
    const Point point(name, errors);
    if (point.error() != 0) return point.fail(-1L);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  };
  if (number == SYS_pidfd_open) {
    return call("pidfd_open", {EMFILE, ENFILE, ENOMEM, ENOSYS, EPERM});
  }
  if (number == SYS_futex && a[1] == FUTEX_WAIT) {
    return call("futex wait", {EINTR, EAGAIN, ETIMEDOUT, EPERM});
  }
  if (number == SYS_futex) return call("futex wake", {EPERM});
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                   void* argument) noexcept {
  static const auto real =
      behind<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  const Point point("pthread_create", {EAGAIN});
  if (point.error() != 0) return point.error();
  return real(thread, attributes, run, argument);
}

// Steps of a board: the linker's --wrap has those who call them from elsewhere call these.
void __real__ZN9shardcomm5Board5beginERKNS_4CallE(shardcomm::Board* board,
                                                  const shardcomm::Call& call);
void __wrap__ZN9shardcomm5Board5beginERKNS_4CallE(shardcomm::Board* board,
                                                  const shardcomm::Call& call) {
  const Point point("begin", {});
  __real__ZN9shardcomm5Board5beginERKNS_4CallE(board, call);
}
void __real__ZN9shardcomm5Board4meetEv(shardcomm::Board* board);
void __wrap__ZN9shardcomm5Board4meetEv(shardcomm::Board* board) {
  const Point point("meet", {});
  __real__ZN9shardcomm5Board4meetEv(board);
}
void __real__ZN9shardcomm5Board3endEv(shardcomm::Board* board);
void __wrap__ZN9shardcomm5Board3endEv(shardcomm::Board* board) {
  const Point point("end", {});
  __real__ZN9shardcomm5Board3endEv(board);
}

}  // extern "C"

namespace {

void* allocate(std::size_t bytes, std::size_t alignment) {
  const Point point("new", {ENOMEM});
  void* memory = nullptr;
  if (point.error() != 0 || posix_memalign(&memory, alignment, bytes) != 0) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
