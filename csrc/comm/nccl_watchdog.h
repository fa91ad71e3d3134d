// Ends what does not end by itself: looks after the collectives that are on their streams, and
// aborts NCCL when one fails or is late.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "comm/nccl_channel.h"

namespace shardcomm {

// A collective between two events: `start` fires when its turn on the stream has come, from where
// its deadline runs; `end` when it is done.
struct Watched {
  Call call;
  cudaEvent_t start = nullptr;
  cudaEvent_t end = nullptr;
  bool started = false;
  std::chrono::steady_clock::time_point since;
};

// The watched collectives of a channel, oldest first. So many at most: who issues more waits, well
// before the driver's own queue is full and NCCL would block in it.
struct WatchRing {
  static constexpr std::uint64_t kMost = 256;
  std::array<Watched, kMost> slots;
  std::uint64_t issued = 0;
  std::uint64_t retired = 0;
};

class NcclWatchdog {
 public:
  NcclWatchdog(NcclRank& rank, NcclChannel& gathers, NcclChannel& reduces)
      : rank_(rank), gathers_(gathers), reduces_(reduces) {}
  ~NcclWatchdog();
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;

  // Around the launch of a collective, by the thread that has the channel's turn. `begin` waits
  // while the ring is full. A launch that throws is left unwatched: no `end`.
  Watched& begin(NcclChannel& channel, const Call& call, cudaStream_t stream);
  void end(NcclChannel& channel, Watched& watched, cudaStream_t stream);
  // Waits until none of the channel is left, without a deadline: each has its own. Throws
  // CommError.
  void drain(NcclChannel& channel);
  // Waits until none is left, or until the deadline has passed: false.
  bool drain_all() noexcept;

  // On a thread of its own, until stopped, or until the rank has failed and NCCL is aborted.
  void run();
  void wake() noexcept;  // any thread: after the rank failed
  void stop() noexcept;  // nothing is left to watch
  bool wait_for_end(std::chrono::duration<double> deadline) noexcept;  // of run

  // Ends both communicators, and the kernels of theirs that run.
  void abort_all() noexcept;

 private:
  WatchRing& ring(const NcclChannel& channel) {
    return &channel == &gathers_ ? rings_[0] : rings_[1];
  }
  bool idle() const;
  void look(WatchRing& ring);
  void look_at_nccl(NcclChannel& channel);

  NcclRank& rank_;
  NcclChannel& gathers_;
  NcclChannel& reduces_;
  std::mutex mutex_;  // of all below; taken before a channel's only by try_lock
  std::condition_variable changed_;
  std::array<WatchRing, 2> rings_;
  bool asleep_ = false;
  bool stopping_ = false;
  bool ended_ = false;
  bool unloaded_ = false;  // the process ends, and the driver has gone before
};

}  // namespace shardcomm
