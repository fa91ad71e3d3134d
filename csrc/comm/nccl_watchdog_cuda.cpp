#include <algorithm>
#include <utility>

#include "comm/nccl_watchdog.h"
#include "cuda/runtime.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

using Clock = std::chrono::steady_clock;

cudaError_t query(cudaEvent_t event) {
  const cudaError_t state = cudaEventQuery(event);
  if (state != cudaSuccess) cudaGetLastError();
  return state;
}

}  // namespace

NcclWatchdog::~NcclWatchdog() {
  for (WatchRing& ring : rings_) {
    for (Watched& watched : ring.slots) {
      if (watched.start != nullptr) cudaEventDestroy(watched.start);
      if (watched.end != nullptr) cudaEventDestroy(watched.end);
    }
  }
}

Watched& NcclWatchdog::begin(NcclChannel& channel, const Call& call, cudaStream_t stream) {
  WatchRing& watch = ring(channel);
  std::unique_lock<std::mutex> lock(mutex_);
  if (watch.issued - watch.retired == WatchRing::kMost) {
    Patience forever(std::chrono::hours(24 * 365));
    for (look(watch); watch.issued - watch.retired == WatchRing::kMost; look(watch)) {
      lock.unlock();
      rank_.check();
      forever.pause();
      lock.lock();
    }
  }
  Watched& watched = watch.slots[watch.issued % WatchRing::kMost];
  lock.unlock();  // nobody else looks at it before it is issued
  watched.call = call;
  watched.started = false;
  for (cudaEvent_t* event : {&watched.start, &watched.end}) {
    if (*event != nullptr) continue;
    check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  check_cuda(cudaEventRecord(watched.start, stream), "cudaEventRecord");
  return watched;
}

void NcclWatchdog::end(NcclChannel& channel, Watched& watched, cudaStream_t stream) {
  check_cuda(cudaEventRecord(watched.end, stream), "cudaEventRecord");
  const std::lock_guard<std::mutex> lock(mutex_);
  ++ring(channel).issued;
  if (asleep_) changed_.notify_all();
}

void NcclWatchdog::drain(NcclChannel& channel) {
  WatchRing& watch = ring(channel);
  Patience forever(std::chrono::hours(24 * 365));
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      look(watch);
      if (watch.issued == watch.retired) return;
    }
    rank_.check();
    forever.pause();
  }
}

bool NcclWatchdog::drain_all() noexcept {
  try {
    Patience patience(rank_.deadline);
    while (true) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (WatchRing& watch : rings_) look(watch);
        if (idle()) return true;
      }
      if (rank_.failed() || !patience.pause()) return false;
    }
  } catch (...) {  // interrupted
    return false;
  }
}

void NcclWatchdog::wake() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

void NcclWatchdog::run() {
  const BesideCapture beside;
  cudaSetDevice(rank_.device);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ && !unloaded_ && !rank_.failed()) {
    asleep_ = idle();
    if (asleep_) {
      changed_.wait(lock, [this] { return stopping_ || rank_.failed() || !idle(); });
      asleep_ = false;
    } else {
      changed_.wait_for(lock, kWaitSlice, [this] { return stopping_ || rank_.failed(); });
    }
    for (WatchRing& watch : rings_) look(watch);
    look_at_nccl(gathers_);
    look_at_nccl(reduces_);
  }
  if (rank_.failed() && !unloaded_) {
    lock.unlock();
    abort_all();
    lock.lock();
  }
  ended_ = true;
  changed_.notify_all();
}

void NcclWatchdog::stop() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

bool NcclWatchdog::wait_for_end(std::chrono::duration<double> deadline) noexcept {
  const auto longest = std::min<std::chrono::duration<double>>(deadline, std::chrono::hours(24));
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, longest, [this] { return ended_; });
}

void NcclWatchdog::abort_all() noexcept {
  const std::scoped_lock lock(gathers_.mutex, reduces_.mutex);
  const nccl::Library& nccl = rank_.nccl;
  // Aborting waits for the communicator's kernels, and on their streams those of one may wait for
  // those of the other. In a group, both are told to end before either is waited for.
  nccl.group_start();
  for (NcclChannel* channel : {&gathers_, &reduces_}) {
    nccl::Comm comm = std::exchange(channel->comm, nullptr);
    if (comm != nullptr) nccl.comm_abort(comm);
  }
  nccl.group_end();
  for (NcclChannel* channel : {&gathers_, &reduces_}) channel->deregister_all();
}

bool NcclWatchdog::idle() const {
  return rings_[0].issued == rings_[0].retired && rings_[1].issued == rings_[1].retired;
}

// All of them, as they may be on different streams, and end in another order than they began.
void NcclWatchdog::look(WatchRing& watch) {
  const BesideCapture beside;
  const Clock::time_point now = Clock::now();
  for (std::uint64_t i = watch.retired; i != watch.issued; ++i) {
    Watched& watched = watch.slots[i % WatchRing::kMost];
    cudaError_t state = query(watched.end);
    if (state == cudaSuccess) {
      if (i == watch.retired) ++watch.retired;
      continue;
    }
    if (state == cudaErrorNotReady && !watched.started) {
      state = query(watched.start);
      watched.started = state == cudaSuccess;
      watched.since = now;
    }
    if (state != cudaSuccess && state != cudaErrorNotReady) {
      unloaded_ = state == cudaErrorCudartUnloading;
      return rank_.fail(describe(watched.call) + ": CUDA: " + cudaGetErrorString(state));
    }
    if (watched.started && now - watched.since > rank_.deadline) {
      return rank_.fail(rank_.late(watched.call));
    }
  }
}

// NCCL's own threads meet errors that no call returns, of the network for instance. Who is in a
// call sees them there.
void NcclWatchdog::look_at_nccl(NcclChannel& channel) {
  const std::unique_lock<std::mutex> lock(channel.mutex, std::try_to_lock);
  if (!lock.owns_lock() || channel.settling || channel.comm == nullptr) return;
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = rank_.nccl.comm_get_async_error(channel.comm, &state);
  if (asked != nccl::kSuccess) state = asked;
  if (state == nccl::kSuccess || state == nccl::kInProgress) return;
  const WatchRing& watch = ring(channel);
  Call call;
  if (watch.issued != watch.retired) call = watch.slots[watch.retired % WatchRing::kMost].call;
  rank_.fail(rank_.refused(call, state, channel.comm));
}

}  // namespace shardcomm
