// There is one exception for each kind of trouble. A caller's mistake is std::invalid_argument (in
// Python ValueError), trouble between ranks is CommError, and trouble with the device is CudaError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardcomm {

// What a CommError says to programs; people read its text.
struct CommFault {
  static constexpr int kNobody = -1;  // it is no single rank's fault, or that is not known

  // "died", "late", "mismatch" (ranks called different collectives, or wait for each other),
  // "closed", "aborted", or "backend": the transport, the system or the set-up refused.
  const char* kind = "backend";
  int rank = kNobody;  // the rank whose fault it is
  // The collective that this rank was in, "all_gather", or "send" or "recv"; empty: in none.
  std::string operation;
  std::uint64_t sequence = 0;  // the number of that call, from 1 on
  int reporter = kNobody;      // the rank that noticed
};

// A rank died, called something else, or came too late. The message names the rank, the operation
// and its sequence number, what was expected and what came. Afterwards the communicator only
// throws.
class CommError : public std::runtime_error {
 public:
  explicit CommError(const std::string& text, CommFault fault = {})
      : std::runtime_error(text), fault_(std::move(fault)) {}

  const CommFault& fault() const { return fault_; }

 private:
  CommFault fault_;
};

// CUDA refused, or this build or this machine has no CUDA.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace shardcomm
