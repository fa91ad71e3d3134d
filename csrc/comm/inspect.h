// What the ranks of a group are in, read from the memory that they share. Who reads it takes no
// part in anything and stops nobody, and need not be a rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/group.h"
#include "shardcomm/communicator.h"

namespace shardcomm {

// Of every rank of the group.
std::vector<Pending> pending(const Group& group);

// A group of processes, as one sees it that is none of its ranks.
struct GroupReport {
  struct Rank {
    std::int32_t pid = 0;  // 0: not known yet
    std::uint64_t start = 0;
    bool attached = false;
    bool closed = false;
  };
  std::vector<Rank> ranks;
  std::string failure;  // why it has failed, or nothing
  std::vector<Pending> pending;
};

// How /proc/PID/fd shows the control memory of a group: what a process opens there, it can read.
inline constexpr const char* kGroupLabel = "shardcomm-group";
// How many ranks the group has whose control memory `fd` is. Throws CommError if it is none, or
// laid out by another build of shardcomm.
int read_size(int fd);
// That group. Throws as `read_size` does.
GroupReport read_group(int fd);
// From now on, others may read the memory, and ranks attach to it.
void mark_readable(GroupMemory& memory, int size);

}  // namespace shardcomm
