// Watches whether a process has ended.
#pragma once

#include "comm/mapping.h"
#include "shardcomm/communicator.h"

namespace shardcomm {

// Watches a process through a descriptor that stays with the process, even if another one gets its
// number: a pidfd or, where a sandbox forbids those, its /proc/PID/stat. Any thread may ask.
class ProcessWatch {
 public:
  // A process that is not there any more has ended. Throws CommError if the process cannot be
  // watched.
  explicit ProcessWatch(const ProcessId& process);

  bool ended() const;

 private:
  bool gone_ = false;
  Fd pidfd_;
  Fd stat_;
};

}  // namespace shardcomm
