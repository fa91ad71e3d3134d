// The memory through which the ranks of a group meet, and how it is laid out.
#pragma once

#include <cstddef>

#include "comm/board_memory.h"
#include "comm/group.h"
#include "comm/mail.h"
#include "comm/tag_names.h"

namespace shardcomm {

// The control memory of a group: the state of its ranks, for each channel a board and the staging
// areas through which private buffers go, the names of tags, and the rings of messages.
struct ControlMemory {
  static constexpr int kChannels = Group::kChannels;  // gather, reduce
  // Each rank has two halves, so that one is filled while the other is read. Smaller halves would
  // stay in a second-level cache, but each half costs a meeting (measured: with 256 KiB it takes
  // 1.3 to 1.6 times as long).
  static constexpr std::size_t kStageBytes = 1024 * 1024;

  // Up to so many bytes of all ranks, a copy costs less than the second meeting of other ways.
  static constexpr std::size_t kInlineBytes = 16 * 1024;

  static std::size_t bytes(int size);
  static GroupMemory* group(std::byte* base);
  static Group::Boards boards(std::byte* base, int size);
  static std::byte* stage(std::byte* base, int size, int channel, int rank, int half);
  static TagNames* names(std::byte* base, int size);
  static MailMemory mail(std::byte* base, int size);
};

}  // namespace shardcomm
