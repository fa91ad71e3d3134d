#include "comm/control_memory.h"

#include "comm/mapping.h"

namespace shardcomm {
namespace {

std::size_t group_bytes(int size) { return round_up(GroupMemory::bytes(size), kPageBytes); }
std::size_t board_bytes(int size) { return round_up(BoardMemory::bytes(size), kPageBytes); }

std::size_t bytes_before_names(int size) {
  return group_bytes(size) +
         ControlMemory::kChannels *
             (board_bytes(size) + static_cast<std::size_t>(size) * 2 * ControlMemory::kStageBytes);
}

std::size_t bytes_before_mail(int size) {
  return bytes_before_names(size) + round_up(sizeof(TagNames), kPageBytes);
}

}  // namespace

std::size_t ControlMemory::bytes(int size) {
  return bytes_before_mail(size) + MailMemory::bytes(size);
}

TagNames* ControlMemory::names(std::byte* base, int size) {
  return reinterpret_cast<TagNames*>(base + bytes_before_names(size));
}

MailMemory ControlMemory::mail(std::byte* base, int size) {
  return {base + bytes_before_mail(size), size, MailMemory::ring_capacity(size)};
}

GroupMemory* ControlMemory::group(std::byte* base) { return reinterpret_cast<GroupMemory*>(base); }

Group::Boards ControlMemory::boards(std::byte* base, int size) {
  std::byte* first = base + group_bytes(size);
  return {reinterpret_cast<BoardMemory*>(first),
          reinterpret_cast<BoardMemory*>(first + board_bytes(size))};
}

std::byte* ControlMemory::stage(std::byte* base, int size, int channel, int rank, int half) {
  const std::size_t index = (static_cast<std::size_t>(channel) * static_cast<std::size_t>(size) +
                             static_cast<std::size_t>(rank)) *
                                2 +
                            static_cast<std::size_t>(half);
  return base + group_bytes(size) + kChannels * board_bytes(size) + index * kStageBytes;
}

}  // namespace shardcomm
