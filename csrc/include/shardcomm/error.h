// One exception per kind of trouble. Callers' mistakes are std::invalid_argument (Python:
// ValueError); trouble between ranks is CommError, trouble with the device CudaError.
#pragma once

#include <stdexcept>
#include <string>

namespace shardcomm {

// A rank died, called something else, or came too late. The message names the rank, the operation
// and its sequence number, what was expected and what came. The communicator is closed for use
// afterwards.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// CUDA refused, or this build or this machine has none.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace shardcomm
