// Reads what the ranks of a group are in from the memory that they share. A reader takes no part in
// anything and stops no rank, and need not be a rank itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/group.h"
#include "shardcomm/communicator.h"

namespace shardcomm {

// What every rank of the group is in. Ranks have the numbers that users know; those of messages,
// which one host alone has, are the group's own.
std::vector<Pending> pending(const Group& group);

// The ranks for which `rank` waits in a send or a receive.
std::vector<int> waits_for(const Group& group, int rank, const Call& message);

// A group of processes, as seen by a process that is none of its ranks.
struct GroupReport {
  struct Rank {
    int number = 0;        // as users know it
    std::int32_t pid = 0;  // 0: not known yet
    std::uint64_t start = 0;
    bool attached = false;
    bool closed = false;
  };
  std::vector<Rank> ranks;
  int hosts = 0;        // among which the group is shared; 0: it is of this host alone
  int host = 0;         // the number of this one
  std::string failure;  // why it has failed; empty if it has not
  std::vector<Pending> pending;
};

// The name of a group's control memory in /proc/PID/fd, where another process can open and read it.
inline constexpr const char* kGroupLabel = "shardcomm-group";
// How many ranks the group has whose control memory is `fd`. Throws CommError if it is none, or was
// laid out by another build of shardcomm.
int read_size(int fd);
// Reads the group whose control memory is `fd`. Throws as `read_size` does.
GroupReport read_group(int fd);
// Marks the memory as ready: from now on other processes may read it, and ranks may attach to it.
void mark_readable(GroupMemory& memory, int size);

}  // namespace shardcomm
