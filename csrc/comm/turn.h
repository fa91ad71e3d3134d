// Checks which thread may use a channel now.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

namespace shardcomm {

// While alive, this thread is in `operation` of a communicator, and cannot call another operation
// there. Python runs signal handlers inside long waits of its main thread, and such a wait goes on
// only when its handler has returned. So the other ranks, which wait for the outer call, would wait
// for the handler.
class InCall {
 public:
  InCall(const void* communicator, const char* operation)
      : communicator_(communicator), operation_(operation) {
    for (const InCall* call = innermost; call != nullptr; call = call->outer_) {
      if (call->communicator_ != communicator) continue;
      throw std::invalid_argument(
          std::string(operation) + ": called from a signal handler while this thread is in " +
          call->operation_ +
          " of the same communicator, which goes on when the handler has returned; let the handler "
          "note what is wanted, and call this afterwards");
    }
    innermost = this;
  }
  ~InCall() { innermost = outer_; }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  inline static thread_local const InCall* innermost = nullptr;

  const void* communicator_;
  const char* operation_;
  const InCall* outer_ = innermost;
};

// Lets one thread at a time into a channel. Ranks must agree on the order of a channel's calls, and
// two threads of a rank have no order.
class Turn {
 public:
  // `check_ended` throws if the communicator has failed: another thread may be on its way out.
  template <class CheckEnded>
  Turn(std::atomic_flag& busy, CheckEnded&& check_ended) : busy_(busy) {
    // Acquire, and release below: this thread sees what the one before left in the channel.
    if (busy_.test_and_set(std::memory_order_acquire)) {
      check_ended();
      throw std::invalid_argument(
          "this communicator's channel is in use by another thread; gathers and reduces are one "
          "channel each, and the calls of a channel need one order on all ranks");
    }
  }
  ~Turn() { busy_.clear(std::memory_order_release); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic_flag& busy_;
};

}  // namespace shardcomm
