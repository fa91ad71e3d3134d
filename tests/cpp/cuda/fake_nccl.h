// What a test sets and asks of the NCCL that this process plays.
#pragma once

struct FakeNccl {
  bool no_window = false;        // ncclCommWindowRegister gives none
  bool never_launches = false;   // a call is in progress until it is aborted
  bool blocking_parent = false;  // ncclCommSplit blocks
  int live = 0;                  // communicators that were not destroyed or aborted
  int misused = 0;               // calls that NCCL forbids
};
