// Memory that ranks share: pages of this process, or a window that several processes map. Memory of
// a device is in local_cuda.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "shardcomm/error.h"

namespace shardcomm {

class Mapping {
 public:
  // Zeroed memory of this process.
  static std::shared_ptr<Mapping> anonymous(std::size_t bytes);
  // The memory behind a file descriptor; the descriptor may be closed afterwards.
  static std::shared_ptr<Mapping> of_file(int fd, std::size_t bytes, bool populate);

  virtual ~Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  virtual int device() const { return -1; }  // the CUDA device it is on; -1: the host

 protected:
  Mapping(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}

 private:
  std::byte* data_;
  std::size_t bytes_;
};

// A file descriptor that closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// Another process's memory is not there; mostly because the process, or its group, has ended.
class UnreachableError : public CommError {
 public:
  using CommError::CommError;
};

// Makes memory without a name, which is gone when the last process that maps it has ended. With
// `reserve` it takes the pages now, so that too little memory is an error here and not a signal
// later. Throws CommError, with the bytes that were wanted. /proc shows it as `label`.
Fd create_window(std::size_t bytes, bool reserve, const char* label = "shardcomm");
// Opens the window behind descriptor `fd` of process `pid`. Throws UnreachableError; CommError if
// this process has too many files open.
Fd open_window(int pid, int fd);

constexpr std::size_t round_up(std::size_t bytes, std::size_t to) {
  return (bytes + to - 1) / to * to;
}
constexpr std::size_t kPageBytes = 4096;

}  // namespace shardcomm
