// Who may use a channel now.
#pragma once

#include <atomic>
#include <stdexcept>

namespace shardcomm {

// One thread at a time: ranks must agree on the order of a channel's calls, and two threads cannot.
class Turn {
 public:
  explicit Turn(std::atomic_flag& busy) : busy_(busy) {
    if (busy_.test_and_set()) {
      throw std::invalid_argument(
          "this communicator's channel is in use by another thread; gathers and reduces are one "
          "channel each, and the calls of a channel need one order on all ranks");
    }
  }
  ~Turn() { busy_.clear(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic_flag& busy_;
};

}  // namespace shardcomm
