// A session's watchdog: it looks, and ends what does not end by itself.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <utility>

#include "comm/nccl_session.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

cudaError_t query(const Event& event) {
  const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(event.native()));
  if (state != cudaSuccess) cudaGetLastError();
  return state;
}

// NCCL's kernels notice an abort within this time. They look every 10,000 spins
// (device/primitives.h).
constexpr std::chrono::seconds kNotice{1};

// NCCL, in another thread, writes it before it waits for the other ranks. Its store is a plain one
// (init.cc: `*newcomm = comm`), which this acquire pairs with on x86; elsewhere nothing but the
// time between two looks says that what it points to is there.
nccl::Comm comm_of(NcclChannel& channel) {
  return __atomic_load_n(&channel.comm, __ATOMIC_ACQUIRE);
}

}  // namespace

void NcclSession::watch() {
  cudaSetDevice(device);
  std::unique_lock<std::mutex> lock(mutex_);
  // What a graph may still launch uses memory that must stay registered.
  while (!failed() && !(closed_.load() && idle() && *graphs_ == 0)) {
    const bool closing = closed_.load();
    changed_.wait_for(lock, closing && !idle() ? std::chrono::milliseconds(1) : kWaitSlice,
                      [&] { return failed() || closed_.load() != closing; });
    for (NcclChannel* channel : {&gathers, &reduces}) {
      look(*channel);
      look_at_nccl(*channel);
    }
    if (closing && !idle() && Clock::now() - closed_at_ > deadline) {
      fail("closed", "closed while collectives were under way");
    }
  }
  lock.unlock();
  end_channels();
  lock.lock();
  over_ = true;
  Memories gone[] = {std::move(gathers.unwanted), std::move(reduces.unwanted)};
  changed_.notify_all();
  lock.unlock();
  if ((gone[0].empty() && gone[1].empty()) || wait_for_device()) return;
  lock.lock();
  for (auto [channel, kept] : {std::pair{&gathers, &gone[0]}, std::pair{&reduces, &gone[1]}}) {
    channel->unwanted.insert(channel->unwanted.end(), kept->begin(), kept->end());
  }
}

std::vector<Pending> NcclSession::pending() {
  Pending none;
  none.rank = rank;
  none.pid = getpid();
  if (forked()) return {none};  // it has no part in this, and a thread of its parent the mutex
  std::vector<Pending> all;
  const std::lock_guard<std::mutex> lock(mutex_);
  const DeviceScope scope(device);
  const RelaxedCapture relaxed;
  const auto add = [&](const char* channel, const Call& call, Clock::time_point since) {
    Pending entry = none;
    entry.channel = channel;
    entry.call = signature(call, names.get());
    entry.sequence = call.sequence;
    const std::chrono::duration<double> waiting = Clock::now() - since;
    if (since != Clock::time_point::max()) entry.waiting_s = waiting.count();
    all.push_back(std::move(entry));
  };
  for (NcclChannel* channel : {&gathers, &reduces}) {
    const char* name = channel == &gathers ? "gather" : "reduce";
    WatchRing& ring = channel->ring;
    for (std::uint64_t i = ring.retired; i != ring.issued; ++i) {
      const WatchedCall& watched = ring.at(i);
      if (query(*watched.end) == cudaSuccess) continue;
      add(name, watched.call, watched.started ? watched.since : Clock::time_point::max());
    }
    if (channel->in_use) add(name, channel->call, channel->since);
  }
  if (all.empty()) all.push_back(none);
  return all;
}

bool NcclSession::idle() const {
  return gathers.ring.empty() && reduces.ring.empty() && !gathers.in_use && !reduces.in_use;
}

// All that is under way, as it may be on different streams, and end in another order than it began.
void NcclSession::look(NcclChannel& channel) {
  const RelaxedCapture relaxed;
  const Clock::time_point now = Clock::now();
  if (channel.in_use && now > channel.since && now - channel.since > deadline) {
    return fail("late", late(channel.call), channel.call);
  }
  WatchRing& ring = channel.ring;
  for (std::uint64_t i = ring.retired; i != ring.issued; ++i) {
    WatchedCall& watched = ring.at(i);
    cudaError_t state = query(*watched.end);
    if (state == cudaSuccess) {
      if (i == ring.retired) ++ring.retired;
      continue;
    }
    if (state == cudaErrorNotReady && !watched.started && i == ring.retired) {
      state = query(*watched.start);
      watched.started = state == cudaSuccess;
      watched.since = now;
    }
    if (state != cudaSuccess && state != cudaErrorNotReady) {
      unloaded_ = state == cudaErrorCudartUnloading;
      return fail("backend", describe(watched.call) + ": CUDA: " + cudaGetErrorString(state),
                  watched.call);
    }
    if (watched.started && now - watched.since > deadline) {
      return fail("late", late(watched.call), watched.call);
    }
  }
}

// NCCL's own threads meet errors that no call returns, of the network for instance. It may be asked
// while another thread is in a call, but not before it has connected.
void NcclSession::look_at_nccl(NcclChannel& channel) {
  if (!channel.connected) return;
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = nccl.comm_get_async_error(channel.comm, &state);
  if (asked != nccl::kSuccess) state = asked;
  if (state == nccl::kSuccess || state == nccl::kInProgress) return;
  const Call& call =
      channel.ring.empty() ? channel.call : channel.ring.at(channel.ring.retired).call;
  fail("backend", refused(call, state), call);
}

void NcclSession::end_channels() {
  if (unloaded_) return;
  try {
    const DeviceScope scope(device);
    if (failed() || !destroy_channels()) abort_channels();
  } catch (const CudaError&) {  // the process ends and the driver has gone before
  }
}

// NCCL must not destroy a communicator with an error: it would leave this thread in a group.
bool NcclSession::destroy_channels() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (NcclChannel* channel : {&gathers, &reduces}) look_at_nccl(*channel);
  }
  if (failed()) return false;
  for (NcclChannel* channel : {&gathers, &reduces}) {
    Memories all;
    for (const auto& [_, memory] : channel->registered) all.push_back(memory);
    forget(*channel, all);
    nccl.comm_destroy(std::exchange(channel->comm, nullptr));
  }
  return true;
}

// The channel's oldest collective, if its turn has come and it is not done; retires those that are.
// Needs the mutex.
const WatchedCall* NcclSession::on_device(NcclChannel& channel) {
  const RelaxedCapture relaxed;
  WatchRing& ring = channel.ring;
  while (!ring.empty() && query(*ring.at(ring.retired).end) != cudaErrorNotReady) ++ring.retired;
  if (ring.empty()) return nullptr;
  WatchedCall& oldest = ring.at(ring.retired);
  if (!oldest.started && query(*oldest.start) == cudaSuccess) {
    oldest.started = true;
    oldest.since = Clock::now();
  }
  return oldest.started ? &oldest : nullptr;
}

// Looks on while NCCL aborts. Symmetric kernels look at no abort flag before NCCL 2.29.7
// (nccl_device/impl/lsa_barrier__funcs.h, wait), and in no version does what copy engines wait for
// (ce_coll.cc, CU_STREAM_MEM_OP_WAIT_VALUE_32). If the rank that they wait for never comes, the GPU
// waits for ever, and with it whoever waits for the GPU, such as NCCL's own abort (init.cc,
// commDestroySync). Only the end of the process ends that. torch's ProcessGroupNCCL ends it too, by
// default as soon as a collective is late (TORCH_NCCL_ASYNC_ERROR_HANDLING=3).
void NcclSession::watch_abort(const std::atomic<bool>& freed) {
  cudaSetDevice(device);
  const Clock::time_point aborted = Clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!freed && !(gathers.ring.empty() && reduces.ring.empty())) {
    for (NcclChannel* channel : {&gathers, &reduces}) {
      const WatchedCall* left = on_device(*channel);
      if (left == nullptr) continue;
      const std::chrono::duration<double> stayed = Clock::now() - std::max(aborted, left->since);
      if (stayed > deadline) end_process(left->call);
      stuck_ = stuck_ || stayed > std::min<std::chrono::duration<double>>(kNotice, deadline / 2);
      if (stuck_) changed_.notify_all();
    }
    changed_.wait_for(lock, kWaitSlice);
  }
}

void NcclSession::end_process(const Call& call) const {
  std::fprintf(stderr,
               "%s. %s is still on the GPU %g s after the abort, and NCCL %s cannot take it from "
               "there: this process ends now, as whatever waits for the GPU would never end\n",
               failure_.c_str(), describe(call).c_str(), deadline.count(),
               nccl::version_text(nccl.version).c_str());
  std::fflush(stderr);
  std::abort();
}

// Brings back the threads that are in calls and ends the kernels, and only when nobody is in NCCL
// any more lets it free the communicators. One that NCCL cannot bring back stays with what it uses.
void NcclSession::abort_channels() {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(deadline);
  const bool grouped = nccl.aborts_in_groups();
  const auto wait_while = [&](const auto& condition) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (condition() && Clock::now() < end) changed_.wait_for(lock, std::chrono::milliseconds(1));
    return !condition();
  };
  // An NCCL that cannot bring back a thread that connects need not be waited for.
  if (!grouped && !(gathers.connected && reduces.connected)) return;
  std::atomic<bool> freed{false};
  const auto looks_on = std::async(std::launch::async, [&] { watch_abort(freed); });
  if (grouped) nccl.group_start();
  nccl::Comm comms[2] = {};
  for (NcclChannel* channel : {&gathers, &reduces}) {
    nccl::Comm& comm = comms[channel == &gathers ? 0 : 1];
    wait_while([&] { return (comm = comm_of(*channel)) == nullptr && channel->in_use; });
    if (grouped && comm != nullptr) nccl.comm_abort(comm);
  }
  if (!wait_while([this] { return gathers.in_use || reduces.in_use; })) {
    const std::lock_guard<std::mutex> lock(mutex_);
    stuck_ = true;  // the onlooker stays until the GPU is done, and `close` does not wait for it
    changed_.notify_all();
    return;
  }
  if (grouped) {
    nccl.group_end();
  } else {
    // Each waits for its kernels, and those may wait for the other's on their streams. NCCL leaves
    // a thread with the device that it had: without one that would be GPU 0, and a context there.
    const auto other = std::async(std::launch::async, [&] {
      cudaSetDevice(device);
      nccl.comm_abort(comms[1]);
    });
    nccl.comm_abort(comms[0]);
    other.wait();
  }
  for (NcclChannel* channel : {&gathers, &reduces}) {
    channel->comm = nullptr;
    channel->registered.clear();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  freed = true;
  changed_.notify_all();
}

}  // namespace shardcomm
