// Tells a forked child from its parent. The child has copies of the parent's objects, but none of
// its threads, and it is not the parent's rank.
#pragma once

namespace shardcomm {

// How many forks made this process, since the library was loaded. An object that was made at
// another count is the parent's. To ask for the process's number instead would be a system call.
int forks() noexcept;

}  // namespace shardcomm
