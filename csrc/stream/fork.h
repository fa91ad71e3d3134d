// Tells a forked child from its parent. A child has copies of the parent's objects, but none of its
// threads, and it is not the parent's rank.
#pragma once

namespace shardcomm {

// How many forks lead to this process since the library was loaded. An object that was made at
// another count is a parent's. (To ask for the process's number instead would be a system call.)
int forks() noexcept;

// Makes each fork call these functions from now on: `before` and `after` in the parent, and
// `in_child` in the child. Null ones are left out. Throws std::runtime_error if the system has no
// room to note them.
void at_fork(void (*before)(), void (*after)(), void (*in_child)());

}  // namespace shardcomm
