// A channel: collectives that have one order on all ranks, with their board and their state.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/board.h"
#include "comm/filler.h"
#include "comm/staging.h"
#include "comm/turn.h"
#include "comm/windows.h"

namespace shardcomm {

// Gathers are one channel, and reduces are the other. The two proceed independently.
class Channel {
 public:
  Channel(Group& group, int index, bool reads_addresses, std::function<bool()> stuck)
      : index(index),
        board(group, index, reads_addresses, std::move(stuck)),
        sources(static_cast<std::size_t>(group.size())) {}
  const int index;
  Board board;
  Staging staging{board};
  Filler filler;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::atomic<bool> used{false};
  std::shared_ptr<const WindowTable> windows;  // the windows at the present call
  std::uint64_t meetings = 0;                  // how many meetings have ordered work on streams
  std::uint32_t windows_made = 0;
  bool few = false;                  // the present call's elements lie beside what its ranks post
  std::vector<const void*> sources;  // of a reduction; kept, so that no call allocates them
};

}  // namespace shardcomm
