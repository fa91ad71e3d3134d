// What the C++ tests of communicators share: claims, and ranks that are threads or processes.
#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/mailbox.h"
#include "shardcomm/communicator.h"
#include "shardcomm/dtype.h"
#include "shardcomm/error.h"
#include "shardcomm/parts.h"
#include "shardcomm/reduce.h"

namespace ranks {

// So that `using namespace ranks` is all that a test needs.
using shardcomm::CommError;
using shardcomm::Communicator;
using shardcomm::DType;
using shardcomm::Parts;
using shardcomm::RedOp;
using shardcomm::Use;

using Bytes = std::vector<unsigned char>;
using Body = std::function<void(Communicator&)>;

constexpr double kLongS = 60.0;  // a deadline that does not pass

inline void require(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim.c_str());
  std::exit(1);
}

// Bytes that follow from a number, so that all ranks know them. They are made in words, since a
// sanitizer looks at each write.
inline Bytes message(std::uint64_t seed, std::size_t bytes) {
  std::vector<std::uint64_t> words(bytes / sizeof(std::uint64_t) + 1);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15U + 1;
  for (std::uint64_t& word : words) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    word = state ^ state >> 32;  // the lower bits repeat soon
  }
  const auto* first = reinterpret_cast<const unsigned char*>(words.data());
  return Bytes(first, first + bytes);
}

inline void on_threads(int size, const Body& body, double deadline_s = kLongS) {
  const auto group = shardcomm::make_local_group(size, {deadline_s});
  std::vector<std::thread> threads;
  for (const auto& comm : group) threads.emplace_back([&body, comm] { body(*comm); });
  for (std::thread& thread : threads) thread.join();
}

// Ranks may also be killed.
inline void on_processes(int size, const Body& body, double deadline_s = kLongS) {
  const shardcomm::ShmSession session(size);
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(120);
      {
        const auto comm = shardcomm::make_shm(session.address(), rank, size, {deadline_s});
        body(*comm);
      }
      std::exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    require(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "a rank process succeeds");
  }
}

inline void on_both(int size, const Body& body, double deadline_s = kLongS) {
  on_processes(size, body, deadline_s);
  on_threads(size, body, deadline_s);
}

// The process of another rank, once that has ended.
inline void until_dead(const Communicator& comm, int rank) {
  const std::int32_t pid = comm.pending().at(static_cast<std::size_t>(rank)).pid;
  const auto fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return;  // it is gone altogether
  pollfd end{fd, POLLIN, 0};
  require(poll(&end, 1, 60'000) == 1, "the process ends");
  close(fd);
}

// While alive, whoever writes to the pages of `data` crashes.
class WriteProtected {
 public:
  WriteProtected(void* data, std::size_t bytes) : data_(data), bytes_(bytes) { set(PROT_READ); }
  ~WriteProtected() { set(PROT_READ | PROT_WRITE); }
  WriteProtected(const WriteProtected&) = delete;
  WriteProtected& operator=(const WriteProtected&) = delete;

 private:
  void set(int access) const { require(mprotect(data_, bytes_, access) == 0, "it is pages"); }
  void* data_;
  std::size_t bytes_;
};

inline CommError error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    return error;
  }
  require(false, "the call fails");
  std::abort();
}

// `text` has all the parts, in this order, and begins with the first.
inline void require_text(const std::string& text, const std::vector<std::string>& parts) {
  std::size_t from = 0;
  for (const std::string& part : parts) {
    const std::size_t at = text.find(part, from);
    require(at != std::string::npos && (from > 0 || at == 0), "\"" + part + "\" is in: " + text);
    from = at + part.size();
  }
}

inline void require_error(const std::function<void()>& call,
                          const std::vector<std::string>& parts) {
  require_text(error_of(call).what(), parts);
}

}  // namespace ranks
