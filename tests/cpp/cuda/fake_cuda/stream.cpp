// Streams and events.
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "fake_cuda/runtime.h"

void CUstream_st::push(std::function<void()> work) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void CUstream_st::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

bool CUstream_st::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void CUstream_st::end() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
}

void CUstream_st::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

// fired: of the last record; captured: that one was in a capture.
struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<fake::Fired> fired = std::make_shared<fake::Fired>(true);
  fake::Captured captured;
  bool recorded = false;
};

namespace fake {

Counters counters;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

struct Streams {
  std::mutex mutex;
  std::map<cudaStream_t, std::shared_ptr<CUstream_st>> all;
};
// Never destroyed: a stream may still run when the process ends.
Streams& streams() {
  static Streams& instance = *std::make_unique<Streams>().release();
  return instance;
}

cudaStream_t make_stream() {
  auto stream = std::make_shared<CUstream_st>(current_device);
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.emplace(stream.get(), stream);
  }
  std::thread([stream] {
    stream->run();
    const std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(stream.get());
  }).detach();
  return stream.get();
}

struct State {
  std::shared_ptr<Fired> fired;
  Captured captured;
  bool recorded;
};
State state_of(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  return {event->fired, event->captured, event->recorded};
}

std::atomic<bool>& is_instant() {
  static std::atomic<bool> instant = [] {
    const char* asked = std::getenv("FAKE_CUDA_INSTANT");
    return asked != nullptr && std::string(asked) == "1";
  }();
  return instant;
}

}  // namespace

bool instant() { return is_instant().load(std::memory_order_relaxed); }

cudaError_t fail(cudaError_t error) { return last_error = error; }

CUstream_st& stream_of(cudaStream_t stream) {
  if (stream != nullptr) return *stream;
  static thread_local std::map<int, cudaStream_t> of_thread;  // cudaStreamPerThread of a device
  cudaStream_t& found = of_thread[current_device];
  if (found == nullptr) found = make_stream();
  return *found;
}

void wait_for_device() {
  std::vector<std::shared_ptr<CUstream_st>> own;  // which another thread may destroy meanwhile
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    for (const auto& [_, stream] : streams().all) {
      if (stream->device == current_device) own.push_back(stream);
    }
  }
  for (const auto& stream : own) stream->synchronize();
}

}  // namespace fake

using fake::counters;

thread_local bool next_record_fails = false;

void fake_fail_next_record() { next_record_fails = true; }
void fake_enqueue(cudaStream_t stream, std::function<void()> work) {
  fake::put(fake::stream_of(stream), std::move(work));
}
bool fake_is_capturing(cudaStream_t stream) { return fake::is_capturing(fake::stream_of(stream)); }
void fake_cuda_instant(bool instant) { fake::is_instant() = instant; }

FakeCudaCounts fake_cuda_counts() {
  return {counters.events_created, counters.timed_events_created, counters.events_recorded,
          counters.event_queries,  counters.allocations,          counters.work};
}
void fake_cuda_reset_counts() {
  for (auto* counter :
       {&counters.events_created, &counters.timed_events_created, &counters.events_recorded,
        &counters.event_queries, &counters.allocations, &counters.work}) {
    *counter = 0;
  }
}

extern "C" {

cudaError_t cudaDeviceSynchronize() {
  fake::use_context();
  if (const cudaError_t refused = fake::refuse_device(fake::current_device)) return refused;
  fake::wait_for_device();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  fake::use_context();
  *stream = fake::make_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreateWithFlags(stream, 0);
}
// Returns at once; the stream's resources are released when its work is done (Stream Management).
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  fake::use_context();
  std::shared_ptr<CUstream_st> ended;  // its thread may be gone before this one
  {
    const std::lock_guard<std::mutex> lock(fake::streams().mutex);
    ended = fake::streams().all.at(stream);
  }
  ended->end();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  fake::use_context();
  CUstream_st& on = fake::stream_of(stream);
  if (const cudaError_t refused = fake::refuse_captured(on)) return refused;
  on.synchronize();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  fake::use_context();
  CUstream_st& on = fake::stream_of(stream);
  if (const cudaError_t refused = fake::refuse_captured(on)) return refused;
  return on.idle() ? cudaSuccess : fake::fail(cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  fake::use_context();
  CUstream_st& on = fake::stream_of(stream);
  const fake::State state = fake::state_of(event);
  cudaError_t error = cudaSuccess;
  if (fake::wait_captured(on, state.captured, state.recorded, error)) return error;
  if (state.fired->get()) return cudaSuccess;
  on.push([fired = state.fired] { fired->wait(); });
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  fake::use_context();
  ++counters.events_created;
  if ((flags & cudaEventDisableTiming) == 0) ++counters.timed_events_created;
  *event = std::make_unique<CUevent_st>().release();
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  fake::use_context();
  std::unique_ptr<CUevent_st>(event).reset();
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  fake::use_context();
  ++counters.events_recorded;
  if (std::exchange(next_record_fails, false)) return fake::fail(cudaErrorUnknown);
  if (fake::instant()) return cudaSuccess;
  CUstream_st& on = fake::stream_of(stream);
  fake::Captured captured = fake::captured_on(on);
  const std::lock_guard<std::mutex> lock(event->mutex);
  event->recorded = true;
  event->captured = std::move(captured);
  if (event->captured.capture) return cudaSuccess;
  event->fired = std::make_shared<fake::Fired>(false);
  on.push([fired = event->fired] { fired->set(); });
  return cudaSuccess;
}
// Event Management: cudaErrorCapturedEvent for what was last recorded in a capture, which has no
// status; and a query is unsafe beside a capture of global mode
// (cudaThreadExchangeStreamCaptureMode).
cudaError_t cudaEventQuery(cudaEvent_t event) {
  fake::use_context();
  ++counters.event_queries;
  const fake::State state = fake::state_of(event);
  if (state.captured.capture) {
    fake::invalidate(state.captured);
    return fake::fail(cudaErrorCapturedEvent);
  }
  if (const cudaError_t refused = fake::refuse_unsafe()) return refused;
  return state.fired->get() ? cudaSuccess : fake::fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  fake::use_context();
  const fake::State state = fake::state_of(event);
  if (state.captured.capture) {
    fake::invalidate(state.captured);
    return fake::fail(cudaErrorCapturedEvent);
  }
  if (const cudaError_t refused = fake::refuse_unsafe()) return refused;
  state.fired->wait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* time, cudaEvent_t begin, cudaEvent_t end) {
  fake::use_context();
  *time = 0;
  for (cudaEvent_t event : {begin, end}) {
    if (fake::state_of(event).captured.capture) return fake::fail(cudaErrorCapturedEvent);
  }
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    default:
      return "an error";
  }
}
cudaError_t cudaGetLastError() { return std::exchange(fake::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return fake::last_error; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                          std::size_t) {
  fake::use_context();
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return fake::put(fake::stream_of(stream), [=] { function(data); });
}

}  // extern "C"
