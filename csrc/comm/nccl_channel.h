// One order of collectives over NCCL: an ncclComm_t of our own, and the calls to it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "comm/call.h"
#include "comm/nccl_library.h"
#include "comm/turn.h"
#include "shardcomm/error.h"

namespace shardcomm {

// A rank of a communicator, and whether it can still be used. Shared by all that belongs to it.
class NcclRank {
 public:
  NcclRank(const nccl::Library& nccl, int rank, int size, int device, double deadline_s)
      : nccl(nccl), rank(rank), size(size), device(device), deadline(deadline_s) {}

  const nccl::Library& nccl;
  const int rank;
  const int size;
  const int device;
  const std::chrono::duration<double> deadline;

  // The first failure stays; every later call throws it.
  void fail(const std::string& text) noexcept;
  void close() { closed_.store(true); }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  bool ended() const { return failed() || closed_.load(); }
  void check() const;  // throws CommError when it has ended

  std::string name() const;  // "rank 1 of 4"
  std::string late(const Call& call) const;
  std::string refused(const Call& call, nccl::Result result, nccl::Comm comm) const;

 private:
  std::mutex mutex_;
  std::string failure_;  // written once, before failed_
  std::atomic<bool> failed_{false};
  std::atomic<bool> closed_{false};
};

// Memory that NCCL may have been told of.
struct Registration {
  std::shared_ptr<void> memory;  // freed with the last owner, so after it is deregistered
  void* buffer = nullptr;
  nccl::Window window = nullptr;
};

// Locking. NCCL forbids two calls at once to a communicator, and to abort or destroy it under a
// call. So every use of `comm` holds `mutex`, also the abort. Nobody holds it for long: no call of
// a non-blocking communicator blocks, and while one is not done yet (`settling`) its thread pauses
// without the mutex. Then the only thing that others may do to the communicator is to abort it.
class NcclChannel {
 public:
  explicit NcclChannel(NcclRank& rank) : rank_(rank) {}
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  std::mutex mutex;
  nccl::Comm comm = nullptr;  // null before it connects and after it ended
  bool settling = false;
  nccl::Window window = nullptr;  // where NCCL, also after we gave up, writes a new one
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::uint64_t sequence = 0;

  // One call to NCCL, done on this host when this returns: what it launches is then on its stream.
  // Its result. Throws CommError when the rank ends or the deadline passes before, and what
  // check_wait throws.
  template <class Function>
  nccl::Result attempt(const Call& described, Function&& function) {
    Registrations gone;  // freed after the mutex, as that may wait for the device
    std::unique_lock<std::mutex> lock(mutex);
    rank_.check();
    if (has_unwanted_.load(std::memory_order_relaxed)) gone = deregister_unwanted();
    return settle(described, function(comm), lock);
  }
  // As above, for a call that must succeed: if not, the rank has failed, and this throws CommError.
  template <class Function>
  void call(const Call& described, Function&& function) {
    const nccl::Result result = attempt(described, std::forward<Function>(function));
    if (result != nccl::kSuccess) refuse(described, result);
  }

  // A communicator's memory is known to it, as it is deregistered before the communicator ends.
  std::shared_ptr<Registration> keep(Registration registration);
  // Nothing uses the memory any more, on the device neither.
  void let_go(std::shared_ptr<Registration> registration) noexcept;
  void deregister_all();  // the caller holds the mutex

 private:
  using Registrations = std::vector<std::shared_ptr<Registration>>;
  nccl::Result settle(const Call& described, nccl::Result result,
                      std::unique_lock<std::mutex>& lock);
  [[noreturn]] void refuse(const Call& described, nccl::Result result);
  void deregister(Registration& registration);
  Registrations deregister_unwanted();

  NcclRank& rank_;
  std::mutex registrations_mutex_;
  std::unordered_set<std::shared_ptr<Registration>> registrations_;
  Registrations unwanted_;
  std::atomic<bool> has_unwanted_{false};
};

// Waits of the host with a deadline: often at first, then with pauses; lets check_wait in.
class Patience {
 public:
  explicit Patience(std::chrono::duration<double> deadline)
      : end_(Clock::now() + to_ticks(deadline)) {}
  // False once the deadline has passed. Throws what check_wait throws.
  bool pause();

 private:
  using Clock = std::chrono::steady_clock;
  static Clock::duration to_ticks(std::chrono::duration<double> time);

  Clock::time_point end_;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point checked_ = begin_;
};

}  // namespace shardcomm
