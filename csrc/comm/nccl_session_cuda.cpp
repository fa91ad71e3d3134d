// The life of a session: connecting, failing, closing.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "comm/nccl_session.h"
#include "stream/fork.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

using Clock = std::chrono::steady_clock;

Call attach() {
  Call call;
  call.op = Op::attach;
  return call;
}

// What NCCL tells hosts apart by (misc/utils.cc, getHostHash): NCCL_HOSTID, or name and boot.
std::uint64_t this_host() {
  std::string host;
  if (const char* id = std::getenv("NCCL_HOSTID"); id != nullptr && *id != '\0') {
    host = id;
  } else {
    char name[256] = {};
    gethostname(name, sizeof(name) - 1);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    host = std::string(name) + " " + boot;
  }
  return std::hash<std::string>{}(host);
}

// How connecting ended. The connecting thread moves the error in and the caller moves it out, so
// that a thread which reads it has the last reference. With a std::future either thread might free
// it, which is right, too; but the references are counted inside libstdc++, where a thread
// sanitizer sees no order.
struct Outcome {
  std::exception_ptr error;
  std::atomic<bool> known{false};
};

}  // namespace

NcclSession::NcclSession(const nccl::Library& nccl, int rank, int size, int device,
                         const NcclOptions& options)
    : nccl(nccl),
      rank(rank),
      size(size),
      device(device),
      deadline(std::min(options.deadline_s, 365.0 * 24 * 3600)),
      forks_(forks()) {
  const auto most = static_cast<std::size_t>(std::max(size, 2));
  const std::size_t bytes = kZeroBytes + most * sizeof(std::uint64_t);
  for (NcclChannel* channel : {&gathers, &reduces}) {
    channel->set_up = make_cuda_stream(device);
    channel->words = std::make_unique<DeviceMemory>(device, bytes);
    channel->words->fill_with_zeros();
  }
}

void NcclSession::connect(const std::array<nccl::UniqueId, 2>& ids, const NcclOptions& options) {
  const auto self = shared_from_this();
  watchdog_ = std::thread([self] { self->watch(); });
  // On a thread of its own, so that this one lets check_wait in; and an NCCL that cannot be brought
  // back from its call is left behind in it.
  const auto outcome = std::make_shared<Outcome>();
  std::thread([self, ids, options, outcome] {
    std::exception_ptr error;
    try {
      self->connect_channels(ids, options);
    } catch (...) {
      error = std::current_exception();
    }
    outcome->error = std::move(error);
    outcome->known.store(true, std::memory_order_release);
  }).detach();
  try {
    Pauses pauses;
    while (!outcome->known.load(std::memory_order_acquire)) {
      if (failed() && (over() || !nccl.aborts_in_groups())) check();
      pauses.pause();
    }
  } catch (const CommError&) {
    throw;
  } catch (...) {
    fail("aborted", "attach() was interrupted");
    throw;
  }
  if (std::exception_ptr error = std::move(outcome->error)) {
    std::rethrow_exception(std::move(error));
  }
}

void NcclSession::connect_channels(const std::array<nccl::UniqueId, 2>& ids,
                                   const NcclOptions& options) {
  const DeviceScope scope(device);
  nccl::Config config(nccl.version);
  if (options.cta_policy != CtaPolicy::standard) {
    config.cta_policy = static_cast<int>(options.cta_policy);
  }
  for (NcclChannel* channel : {&gathers, &reduces}) {
    const nccl::UniqueId& id = ids[channel == &gathers ? 0 : 1];
    Call call = attach();
    NcclUse use(*this, *channel, call);
    // NCCL writes `comm` before it waits for the others: so it can be aborted meanwhile.
    use([&](nccl::Comm) {
      return nccl.comm_init_rank_config(&channel->comm, size, id, rank, &config);
    });
    const std::lock_guard<std::mutex> lock(mutex_);
    channel->connected = true;
  }
  find_nodes(options.host.empty() ? this_host() : std::hash<std::string>{}(options.host));
  if (!nccl.aborts_in_groups()) meet_all_peers();
  // The first collective of a kind connects, and waits for its peers on the host: that of barriers
  // and allocations here, where Ctrl-C ends it.
  for (NcclChannel* channel : {&gathers, &reduces}) {
    Call call = attach();
    NcclUse(*this, *channel, call).agree(true);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  gathers.sequence = reduces.sequence = 0;
}

void NcclSession::find_nodes(std::uint64_t host) {
  Call call = attach();
  NcclUse use(*this, gathers, call);
  std::vector<std::uint64_t> hosts(static_cast<std::size_t>(size), host);
  auto* all = static_cast<std::byte*>(gathers.words->data()) + kZeroBytes;
  auto* own = all + static_cast<std::size_t>(rank) * sizeof(host);
  const std::size_t bytes = hosts.size() * sizeof(host);
  auto* stream = static_cast<cudaStream_t>(gathers.set_up->native());
  check_cuda(cudaMemcpyAsync(own, &host, sizeof(host), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  use([&](nccl::Comm comm) {
    return nccl.all_gather(own, all, sizeof(host), nccl::kUint8, comm, stream);
  });
  use.finish_set_up();
  check_cuda(cudaMemcpyAsync(hosts.data(), all, bytes, cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  nodes = Nodes(hosts);
}

// The first message between two ranks connects them, and waits for the other on the host, from
// where this NCCL cannot be brought back. Here, where it can be left behind.
void NcclSession::meet_all_peers() {
  Call call = attach();
  NcclUse use(*this, reduces, call);
  auto* words = static_cast<std::byte*>(reduces.words->data()) + kZeroBytes;
  NativeStream stream = reduces.set_up->native();
  use.group([&](const auto& note, nccl::Comm comm) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      note(nccl.send(words + rank, 1, nccl::kUint8, peer, comm, stream));
      note(nccl.recv(words + peer, 1, nccl::kUint8, peer, comm, stream));
    }
  });
  use.finish_set_up();
}

bool NcclSession::forked() const { return forks() != forks_; }

void NcclSession::fail(const char* kind, const std::string& text, const Call& call) noexcept {
  if (forked()) return;
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failed_.load()) return;
  try {
    fault_ = fault_in(call, kind);
    fault_.reporter = rank;
    failure_ = name() + ": " + text;
  } catch (...) {  // no memory for the text: failed without one
  }
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void NcclSession::check() const {
  if (failed()) throw CommError(failure_, fault_);
  if (closed_.load()) {
    throw CommError(name() + " has closed the communicator", {"closed", rank, {}, 0, rank});
  }
}

std::string NcclSession::name() const {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

std::string NcclSession::late(const Call& call) const {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g s", deadline.count());
  return describe(call) + " did not complete in " + seconds +
         ": another rank died, is late, or called something else";
}

// NCCL's last error is one text for the whole process, so a hint only.
std::string NcclSession::refused(const Call& call, nccl::Result result) const {
  std::string text = describe(call) + ": NCCL: " + nccl.get_error_string(result);
  if (result == nccl::kInProgress) {  // which wins over the configuration (envConfigOverride)
    text += ": its calls do not block, as NCCL_COMM_BLOCKING=0 in the environment asks; unset it";
  }
  const char* last = nccl.get_last_error(nullptr);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text;
}

bool NcclSession::over() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return over_;
}

void NcclSession::close() noexcept {
  if (forked()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_.exchange(true) || !watchdog_.joinable()) return;
  closed_at_ = Clock::now();
  for (NcclChannel* channel : {&gathers, &reduces}) {
    if (!channel->in_use) continue;
    fail("closed", describe(channel->call) + " was under way when the communicator was closed",
         channel->call);
  }
  changed_.notify_all();
  // The watchdog ends by itself, unless NCCL or the device hang: then it is left behind, with all
  // that it holds, until it ends the process. It is left behind, too, where a graph has
  // collectives, with which it ends.
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(2 * deadline);
  const auto waits_for_graphs = [this] { return *graphs_ > 0 && (failed() || idle()); };
  while (!over_ && !stuck_ && !waits_for_graphs() && Clock::now() < end) {
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
  const bool over = over_;
  lock.unlock();
  over ? watchdog_.join() : watchdog_.detach();
}

void NcclSession::let_go(NcclChannel& channel, std::shared_ptr<Registered> memory) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!over_) return channel.unwanted.push_back(std::move(memory));
  }
  // NCCL has forgotten it with the communicator.
  if (wait_for_device()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  channel.unwanted.push_back(std::move(memory));
}

// It fails, among others, while another thread captures a graph on this device, which CUDA may
// spoil: a captured step needs a communicator from which nothing is let go meanwhile.
bool NcclSession::wait_for_device() const noexcept {
  try {
    const DeviceScope scope(device);
    return cudaDeviceSynchronize() == cudaSuccess;
  } catch (const CudaError&) {
    return true;  // the process ends and the driver has gone before
  }
}

// Local, and done when it returns. What an aborted communicator has registered, it frees itself.
void NcclSession::forget(NcclChannel& channel, const Memories& memories) {
  const DeviceScope scope(device);  // NCCL may leave another one current
  const RelaxedCapture relaxed;     // it synchronizes a stream of its own
  for (const std::shared_ptr<Registered>& memory : memories) {
    if (!failed()) {
      if (memory->window != nullptr) nccl.comm_window_deregister(channel.comm, memory->window);
      for (void* local : {memory->local, memory->inbox_local}) {
        if (local != nullptr) nccl.comm_deregister(channel.comm, local);
      }
    }
    channel.registered.erase(static_cast<std::byte*>(memory->memory.get()));
  }
}

}  // namespace shardcomm
