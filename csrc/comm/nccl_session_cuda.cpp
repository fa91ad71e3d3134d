// The life of a session: connecting, failing, closing; and a thread's use of a channel.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <future>
#include <stdexcept>
#include <utility>

#include "comm/nccl_session.h"
#include "stream/events_around.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

using Clock = std::chrono::steady_clock;

// How many forks made this process. To ask for its number would be a system call for each
// collective.
std::atomic<int> forks{0};
const int counts_forks = pthread_atfork(nullptr, nullptr, [] { ++forks; });

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

}  // namespace

NcclSession::NcclSession(const nccl::Library& nccl, int rank, int size, int device,
                         const NcclOptions& options)
    : nccl(nccl),
      rank(rank),
      size(size),
      device(device),
      deadline(std::min(options.deadline_s, 365.0 * 24 * 3600)),
      forks_(forks.load()) {
  if (counts_forks != 0) throw CommError("nccl: pthread_atfork failed");
  const auto most = static_cast<std::size_t>(std::max(size, 2));
  const std::size_t bytes = kZeroBytes + most * sizeof(std::uint64_t);
  for (NcclChannel* channel : {&gathers, &reduces}) {
    channel->set_up = make_cuda_stream(device);
    channel->words = std::make_unique<DeviceMemory>(device, bytes);
    check_cuda(cudaMemset(channel->words->data(), 0, bytes), "cudaMemset");
  }
}

void NcclSession::connect(const std::array<nccl::UniqueId, 2>& ids, const NcclOptions& options) {
  const auto self = shared_from_this();
  watchdog_ = std::thread([self] { self->watch(); });
  // On a thread of its own, so that this one lets check_wait in; and an NCCL that cannot be brought
  // back from its call is left behind in it.
  std::packaged_task<void()> task([self, ids, options] { self->connect_channels(ids, options); });
  std::future<void> connected = task.get_future();
  std::thread(std::move(task)).detach();
  try {
    Pauses pauses;
    while (connected.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      if (failed() && (over() || !nccl.aborts_in_groups())) check();
      pauses.pause();
    }
  } catch (const CommError&) {
    throw;
  } catch (...) {
    fail("attach() was interrupted");
    throw;
  }
  connected.get();
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

bool NcclSession::forked() const { return forks.load(std::memory_order_relaxed) != forks_; }

void NcclSession::fail(const std::string& text) noexcept {
  if (forked()) return;
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failed_.load()) return;
  try {
    failure_ = name() + ": " + text;
  } catch (...) {  // no memory for the text: failed without one
  }
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void NcclSession::check() const {
  if (failed()) throw CommError(failure_);
  if (closed_.load()) throw CommError(name() + " has closed the communicator");
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
    fail(describe(channel->call) + " was under way when the communicator was closed");
  }
  changed_.notify_all();
  // The watchdog ends by itself, unless NCCL or the device hang: then it is left behind, with all
  // that it holds. So it is where a graph has collectives, with which it ends.
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(2 * deadline);
  const auto waits_for_graphs = [this] { return *graphs_ > 0 && (failed() || idle()); };
  while (!over_ && !waits_for_graphs() && Clock::now() < end) {
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
  wait_for_device();  // NCCL has forgotten it with the communicator
}

void NcclSession::wait_for_device() const noexcept {
  try {
    const DeviceScope scope(device);
    cudaDeviceSynchronize();
  } catch (const CudaError&) {  // the process ends and the driver has gone before
  }
}

// Local, and done when it returns. What an aborted communicator has registered, it frees itself.
void NcclSession::forget(NcclChannel& channel, const Memories& memories) {
  const DeviceScope scope(device);  // NCCL may leave another one current
  const RelaxedCapture relaxed;     // it synchronizes a stream of its own
  for (const std::shared_ptr<Registered>& memory : memories) {
    if (!failed()) {
      if (memory->window != nullptr) nccl.comm_window_deregister(channel.comm, memory->window);
      if (memory->local != nullptr) nccl.comm_deregister(channel.comm, memory->local);
    }
    channel.registered.erase(static_cast<std::byte*>(memory->memory.get()));
  }
}

NcclUse::NcclUse(NcclSession& session, NcclChannel& channel, Call& call)
    : session_(session), channel_(channel) {
  if (session_.forked()) {
    throw CommError(session_.name() +
                    ": this process was forked from the rank's and has no part in its "
                    "communicator; make one here, or start processes with spawn");
  }
  const std::lock_guard<std::mutex> lock(session_.mutex_);
  session_.check();
  if (channel_.in_use) {
    throw std::invalid_argument(
        "this communicator's channel is in use by another thread; gathers and reduces are one "
        "channel each, and the calls of a channel need one order on all ranks");
  }
  channel_.in_use = true;
  call.sequence = ++channel_.sequence;
  channel_.call = call;
  channel_.since = Clock::now();
}

NcclUse::~NcclUse() {
  const std::lock_guard<std::mutex> lock(session_.mutex_);
  channel_.in_use = false;
  if (session_.ended()) session_.changed_.notify_all();
}

void NcclUse::forget_unwanted() {
  {
    const std::lock_guard<std::mutex> lock(session_.mutex_);
    // While this thread waits for the device, an abort must be able to end what runs there.
    if (channel_.unwanted.empty() || !session_.nccl.aborts_in_groups()) return;
    gone_.swap(channel_.unwanted);
  }
  session_.wait_for_device();
  session_.forget(channel_, gone_);
}

void NcclUse::count_graph(cudaGraph_t graph) {
  auto count = std::make_unique<GraphCount>(session_.graphs_);
  cudaUserObject_t object = nullptr;
  const auto destroy = [](void* counted) {
    std::unique_ptr<GraphCount>(static_cast<GraphCount*>(counted)).reset();
  };
  check_cuda(cudaUserObjectCreate(&object, count.get(), destroy, 1, cudaUserObjectNoDestructorSync),
             "cudaUserObjectCreate");
  count.release();
  check_cuda(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
             "cudaGraphRetainUserObject");
}

template <class Done>
void NcclUse::wait_without_deadline(const Done& done) {
  std::unique_lock<std::mutex> lock(session_.mutex_);
  channel_.since = Clock::time_point::max();
  Pauses pauses;
  for (session_.look(channel_); !done(); session_.look(channel_)) {
    lock.unlock();
    session_.check();
    pauses.pause();
    lock.lock();
  }
  channel_.since = Clock::now();
}

void NcclUse::begin(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  capture_ = 0;
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, &capture_, &graph),
             "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusInvalidated) {
    throw std::invalid_argument("the capture of this stream was invalidated; end it");
  }
  if (status == cudaStreamCaptureStatusNone) capture_ = 0;
  if (channel_.latest != nullptr && channel_.stream != stream && channel_.capture == capture_) {
    check_cuda(cudaStreamWaitEvent(stream, channel_.latest, 0), "cudaStreamWaitEvent");
  }
  if (capture_ != 0) {
    if (channel_.capture != capture_) count_graph(graph);
    return;
  }
  forget_unwanted();
  WatchRing& ring = channel_.ring;
  {
    std::unique_lock<std::mutex> lock(session_.mutex_);
    if (ring.full()) {
      lock.unlock();
      wait_without_deadline([&ring] { return !ring.full(); });
    }
    watched_ = &ring.at(ring.issued);  // nobody else looks at it before it is issued
  }
  watched_->call = channel_.call;
  watched_->started = false;
  const EventsAround* around = EventsAround::current();
  watched_->start = around != nullptr && around->before != nullptr
                        ? around->before
                        : record_on_cuda(session_.device, stream);
}

void NcclUse::end(cudaStream_t stream) {
  channel_.stream = stream;
  channel_.capture = capture_;
  if (watched_ == nullptr) {
    if (!channel_.captured_end) channel_.captured_end = make_event();
    channel_.latest = channel_.captured_end.get();
    check_cuda(cudaEventRecord(channel_.latest, stream), "cudaEventRecord");
    return;
  }
  watched_->end = record_on_cuda(session_.device, stream);
  channel_.latest = static_cast<cudaEvent_t>(watched_->end->native());
  if (EventsAround* around = EventsAround::current()) around->after = watched_->end;
  const std::lock_guard<std::mutex> lock(session_.mutex_);
  ++channel_.ring.issued;
}

void NcclUse::drain() {
  wait_without_deadline([this] { return channel_.ring.empty(); });
  forget_unwanted();
}

void NcclUse::finish_set_up() {
  const auto done = channel_.set_up->record();
  for (Pauses pauses; !done->query(); pauses.pause()) session_.check();
  session_.check();
}

bool NcclUse::agree(bool mine) { return least_of_all({mine ? 1 : 0, 0})[0] != 0; }

bool NcclUse::same_on_all(std::uint64_t mine) {
  const auto value = static_cast<std::int64_t>(mine >> 1);
  const auto least = least_of_all({value, -value});
  return least[0] == -least[1];
}

std::array<std::int64_t, 2> NcclUse::least_of_all(std::array<std::int64_t, 2> values) {
  void* words = static_cast<std::byte*>(channel_.words->data()) + kZeroBytes;
  auto* stream = static_cast<cudaStream_t>(channel_.set_up->native());
  check_cuda(cudaMemcpyAsync(words, &values, sizeof(values), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  (*this)([&](nccl::Comm comm) {
    return session_.nccl.all_reduce(words, words, values.size(), nccl::kInt64, nccl::kMin, comm,
                                    stream);
  });
  finish_set_up();
  check_cuda(cudaMemcpyAsync(&values, words, sizeof(values), cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return values;
}

void Pauses::pause() {
  const Clock::time_point now = Clock::now();
  if (now - checked_ >= kWaitSlice) {
    checked_ = now;
    check_wait();
  }
  const auto waited = now - begin_;
  if (waited < std::chrono::microseconds(200)) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::clamp<Clock::duration>(
        waited / 8, std::chrono::microseconds(50), std::chrono::milliseconds(1)));
  }
}

}  // namespace shardcomm
