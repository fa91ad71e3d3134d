// What a test sets and asks of the NCCL that this process plays. One library for each version, so
// that symbols which that version lacks are absent: libraries are loaded by path, and these
// functions found by dlsym. A rank is a thread, played as a process of its own; rank r uses device
// r.
#pragma once

enum class FakeWindows : int {
  none,      // NCCL_LOCAL_REGISTER=0, and ranks that do not all reach each other's memory
  local,     // ranks that do not all reach each other's memory
  symmetric  // NVLink between all of a node
};

enum class FakeCall : int {
  none,
  init,
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  reduce,
  send,
  recv,
  group_end,
  mem_alloc,
  comm_register,
  window_register
};

struct FakeNccl {
  FakeWindows windows = FakeWindows::symmetric;
  // NCCL_CUMEM_ENABLE=0, if false: no symmetric windows, ncclMemFree is cudaFree, and init
  // connects.
  bool cumem = true;
  int ranks_per_node = 0;  // 0: all ranks on one node

  // Faults. Ranks: -1 is none, kEveryRank is all.
  static constexpr int kEveryRank = -2;
  int never_inits = -1;          // it and its peers wait in ncclCommInitRankConfig until aborted
  int never_finishes_init = -1;  // the same, after init's first all-gather
  int never_connects = -1;       // it and its peers wait where NCCL connects lazily until aborted
  bool kernels_hang = false;     // a kernel ends by an abort only, though its peers have come
  FakeCall fails = FakeCall::none;  // returns fails_with, on fails_on
  int fails_on = kEveryRank;
  int fails_with = 3;  // ncclInternalError

  // Mutations: what no version does, or another version does.
  bool eager_connect = false;   // init connects everything, as collectives' connections in 2.18
  bool late_handle = false;     // *newcomm is null until ncclCommInitRankConfig is done
  bool abort_reclaims = false;  // ncclCommAbort frees at once, in a group too, as 2.18 to 2.21
};

// Since the last fake_nccl_reset, but for what is so now:
struct FakeNcclCounts {
  int live = 0;             // communicators that were not destroyed or aborted
  int hosts_waiting = 0;    // threads that wait in a call for other ranks
  int kernels_waiting = 0;  // kernels that wait for other ranks

  // What NCCL forbids.
  int concurrent_calls = 0;        // two threads in calls on one communicator
  int calls_in_progress = 0;       // a call on a non-blocking communicator before the last was done
  int calls_after_end = 0;         // a call on a communicator that was destroyed or aborted
  int ended_under_call = 0;        // memory reclaimed with another thread in a call
  int registered_at_destroy = 0;   // ncclCommDestroy with memory registered
  int freed_while_registered = 0;  // memory freed that a communicator has registered
  int mixed_modes = 0;             // blocking and non-blocking communicators in one group
  int groups_left_open = 0;        // ncclCommDestroy that failed and left its thread in a group
  int bad_arguments = 0;           // null, unknown dtype, rank or handle, mismatched messages
  int one_sided_messages = 0;      // one side is registered, and the other is not

  // What was done.
  int inits = 0;
  int destroys = 0;
  int aborts = 0;
  int threads = 0;  // made for non-blocking groups
  int collectives = 0;
  int gathers_ring = 0;
  int gathers_symmetric = 0;
  int gathers_copy_engine = 0;
  int scatters_ring = 0;
  int scatters_symmetric = 0;
  int averages_premultiplied = 0;  // ncclAvg of floats
  int messages_direct = 0;         // written from registered memory into registered memory
  int cta_policy = 0;              // of the last communicator made
  int windows_symmetric = 0;
  int windows_local = 0;
  int registrations_local = 0;

  int misused() const {
    return concurrent_calls + calls_in_progress + calls_after_end + ended_under_call +
           registered_at_destroy + freed_while_registered + mixed_modes + groups_left_open +
           bad_arguments + one_sided_messages;
  }
};

extern "C" {
void fake_nccl_set(const FakeNccl* faults);
void fake_nccl_get(FakeNcclCounts* counts);
void fake_nccl_reset();  // counts and bytes
// From now on ncclCommGetAsyncError, and any other call, of this rank's communicators gives it.
void fake_nccl_async_error(int rank, int result);
// What kernels of device `from` have sent to device `to`: by rings, or sends.
unsigned long long fake_nccl_bytes(int from, int to);
// Calls return at once, without peers and without effect. FAKE_NCCL_INSTANT=1 does the same.
void fake_nccl_instant(int instant);
}
