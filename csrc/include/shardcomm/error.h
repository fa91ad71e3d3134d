// One exception per kind of trouble. Callers' mistakes are std::invalid_argument (Python:
// ValueError); trouble between ranks is CommError, trouble with the device CudaError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardcomm {

// What a CommError says, for programs; people read its text.
struct CommFault {
  static constexpr int kNobody = -1;  // it is no single rank's, or not known whose

  // "died", "late", "mismatch" (ranks called different things, or wait for each other), "closed",
  // "aborted", or "backend": the transport, the system or the set-up refused.
  const char* kind = "backend";
  int rank = kNobody;          // whose fault it is
  std::string operation;       // the collective that this rank was in, "all_gather"; empty: in none
  std::uint64_t sequence = 0;  // of that collective, from 1 on
  int reporter = kNobody;      // the rank that noticed
};

// A rank died, called something else, or came too late. The message names the rank, the operation
// and its sequence number, what was expected and what came. The communicator is closed for use
// afterwards.
class CommError : public std::runtime_error {
 public:
  explicit CommError(const std::string& text, CommFault fault = {})
      : std::runtime_error(text), fault_(std::move(fault)) {}

  const CommFault& fault() const { return fault_; }

 private:
  CommFault fault_;
};

// CUDA refused, or this build or this machine has none.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace shardcomm
