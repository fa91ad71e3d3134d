// One order of collectives: a board, and what goes with it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "comm/board.h"
#include "comm/turn.h"
#include "comm/windows.h"

namespace shardcomm {

// Gathers and reduces proceed independently, each in its own order.
class Channel {
 public:
  Channel(Group& group, int index, bool reads_addresses, std::function<bool()> stuck)
      : index(index), board(group, index, reads_addresses, std::move(stuck)) {}
  const int index;
  Board board;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::atomic<bool> used{false};
  std::shared_ptr<const WindowTable> windows;  // those of the present call
  std::uint64_t meetings = 0;                  // of those that order work on streams
  std::uint32_t windows_made = 0;
  std::int64_t chunks_staged = 0;
};

}  // namespace shardcomm
