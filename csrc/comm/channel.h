// One order of collectives: a board, and who may use it now.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "comm/board.h"

namespace shardcomm {

// Gathers and reduces proceed independently, each in its own order.
class Channel {
 public:
  Channel(int index, Board board) : index(index), board(std::move(board)) {}
  const int index;
  Board board;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::uint64_t meetings = 0;  // of those that order work on streams
  std::uint32_t windows_made = 0;
  std::int64_t chunks_staged = 0;
};

// One thread at a time: ranks must agree on the order of a channel's calls, and two threads cannot.
class Turn {
 public:
  explicit Turn(Channel& channel) : channel_(channel) {
    if (channel_.busy.test_and_set()) {
      throw std::invalid_argument(
          "this communicator's channel is in use by another thread; gathers and reduces are one "
          "channel each, and the calls of a channel need one order on all ranks");
    }
  }
  ~Turn() { channel_.busy.clear(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Channel& channel_;
};

}  // namespace shardcomm
