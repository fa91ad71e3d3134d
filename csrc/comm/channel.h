// One order of collectives: a board, and what goes with it.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "comm/board.h"
#include "comm/turn.h"

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

}  // namespace shardcomm
