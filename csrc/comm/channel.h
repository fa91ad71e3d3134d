// A channel: collectives that have one order on all ranks, with their board and their state.
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

// Gathers are one channel, and reduces are the other. The two proceed independently.
class Channel {
 public:
  Channel(Group& group, int index, bool reads_addresses, std::function<bool()> stuck)
      : index(index), board(group, index, reads_addresses, std::move(stuck)) {}
  const int index;
  Board board;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::atomic<bool> used{false};
  std::shared_ptr<const WindowTable> windows;  // the windows at the present call
  std::uint64_t meetings = 0;                  // how many meetings have ordered work on streams
  std::uint32_t windows_made = 0;
  std::int64_t chunks_staged = 0;
};

}  // namespace shardcomm
