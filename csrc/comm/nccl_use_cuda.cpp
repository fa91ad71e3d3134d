// A thread's use of a channel: its turn, its events and graphs, and what the ranks agree on.
#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "comm/nccl_session.h"
#include "stream/events_around.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

NcclUse::NcclUse(NcclSession& session, NcclChannel& channel, Call& call)
    : in_call_(&session, name(call.op)), session_(session), channel_(channel) {
  if (session_.forked()) {
    throw CommError(session_.name() +
                        ": this process was forked from the rank's and has no part in its "
                        "communicator; make one here, or start processes with spawn",
                    {"closed", session_.rank, {}, 0, session_.rank});
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
  if (session_.wait_for_device()) return session_.forget(channel_, gone_);
  const std::lock_guard<std::mutex> lock(session_.mutex_);
  for (auto& memory : gone_) channel_.unwanted.push_back(std::move(memory));
  gone_.clear();
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
  // Also on the same stream: equal handles may be different streams, such as cudaStreamPerThread.
  if (channel_.latest != nullptr && channel_.capture == capture_) {
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
