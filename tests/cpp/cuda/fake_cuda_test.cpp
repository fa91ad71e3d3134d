// The played CUDA runtime does what the documentation says of captures, events and streams.
#include "fake_cuda.h"

#include <cuda.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <thread>
#include <vector>

namespace {

void require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim);
  std::_Exit(1);
}

class Queue {
 public:
  Queue() { cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~Queue() { cudaStreamDestroy(stream_); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Mark {
 public:
  Mark() { cudaEventCreateWithFlags(&event_, cudaEventDisableTiming); }
  ~Mark() { cudaEventDestroy(event_); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Ends the capture of `stream`, and with it the graph if there is one.
cudaError_t end(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  const cudaError_t result = cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  return result;
}

void captured_work_runs_when_its_graph_is_launched() {
  Queue origin;
  Queue side;
  Mark fork;
  Mark join;
  std::vector<int> ran;
  const auto run = [&ran](int number) { return [&ran, number] { ran.push_back(number); }; };
  cudaStreamBeginCapture(origin, cudaStreamCaptureModeGlobal);
  fake_enqueue(origin, run(1));
  cudaEventRecord(fork, origin);
  cudaStreamWaitEvent(side, fork, 0);
  require(fake_is_capturing(side), "a wait for a captured event joins the capture");
  fake_enqueue(side, run(2));
  cudaEventRecord(join, side);
  cudaStreamWaitEvent(origin, join, 0);
  fake_enqueue(origin, run(3));
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(origin, &graph) == cudaSuccess, "a joined capture ends well");
  require(!fake_is_capturing(side), "all its streams are left by the capture");
  cudaStreamSynchronize(origin);
  require(ran.empty(), "nothing has run");
  cudaGraphExec_t executable = nullptr;
  cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  cudaGraphLaunch(executable, origin);
  cudaGraphLaunch(executable, origin);
  cudaStreamSynchronize(origin);
  require(ran == std::vector<int>{1, 2, 3, 1, 2, 3}, "each launch runs it, in order");
  cudaGraphExecDestroy(executable);
}

void an_unjoined_fork_is_an_error() {
  Queue origin;
  Queue side;
  Mark fork;
  cudaStreamBeginCapture(origin, cudaStreamCaptureModeGlobal);
  cudaEventRecord(fork, origin);
  cudaStreamWaitEvent(side, fork, 0);
  fake_enqueue(side, [] {});
  require(end(side) == cudaErrorStreamCaptureUnmatched, "the fork does not end the capture");
  require(end(origin) == cudaErrorStreamCaptureUnjoined, "unjoined");
}

void a_captured_event_has_no_status() {
  Queue origin;
  Queue other;
  Mark mark;
  cudaStreamBeginCapture(origin, cudaStreamCaptureModeRelaxed);
  cudaEventRecord(mark, origin);
  require(cudaEventQuery(mark) == cudaErrorCapturedEvent, "not while it is captured");
  require(end(origin) == cudaErrorStreamCaptureInvalidated, "and the query ended the capture");
  require(cudaEventQuery(mark) == cudaErrorCapturedEvent, "not afterwards");
  require(cudaStreamWaitEvent(other, mark, 0) == cudaErrorCapturedEvent, "nor is it waited for");
  cudaEventRecord(mark, other);
  cudaStreamSynchronize(other);
  require(cudaEventQuery(mark) == cudaSuccess, "recorded again, it has one");
}

void work_from_outside_is_no_dependency() {
  Queue origin;
  Queue other;
  Mark mark;
  cudaEventRecord(mark, other);
  cudaStreamBeginCapture(origin, cudaStreamCaptureModeGlobal);
  require(cudaStreamWaitEvent(origin, mark, 0) == cudaErrorStreamCaptureIsolation, "isolation");
  require(end(origin) == cudaErrorStreamCaptureInvalidated, "invalidated");
}

// What a thread gets for an unsafe call beside a capture of this one, and what becomes of that.
void unsafe_call(cudaStreamCaptureMode capture, cudaStreamCaptureMode thread, bool own,
                 bool allowed) {
  Queue origin;
  Mark mark;
  cudaStreamBeginCapture(origin, capture);
  const auto call = [&] {
    cudaStreamCaptureMode mode = thread;
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaError_t query = cudaEventQuery(mark);
    void* data = nullptr;
    const cudaError_t malloc = cudaMalloc(&data, 1);
    if (malloc == cudaSuccess) {
      cudaStreamCaptureMode relaxed = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&relaxed);
      cudaFreeAsync(data, nullptr);
      cudaThreadExchangeStreamCaptureMode(&relaxed);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    require(mode == thread, "the modes are exchanged");
    require(query == malloc, "both are unsafe");
    return query;
  };
  const cudaError_t result = own ? call() : std::async(std::launch::async, call).get();
  require(result == (allowed ? cudaSuccess : cudaErrorStreamCaptureUnsupported), "as documented");
  require(end(origin) == (allowed ? cudaSuccess : cudaErrorStreamCaptureInvalidated),
          "what is refused invalidates the capture");
}

void unsafe_calls() {
  constexpr auto kGlobal = cudaStreamCaptureModeGlobal;
  constexpr auto kLocal = cudaStreamCaptureModeThreadLocal;
  constexpr auto kRelaxed = cudaStreamCaptureModeRelaxed;
  for (const auto capture : {kGlobal, kLocal, kRelaxed}) {
    for (const auto thread : {kGlobal, kLocal, kRelaxed}) {
      unsafe_call(capture, thread, true, thread == kRelaxed || capture == kRelaxed);
      unsafe_call(capture, thread, false, thread != kGlobal || capture != kGlobal);
    }
  }
}

void nothing_waits_for_a_capturing_stream() {
  Queue origin;
  cudaStreamBeginCapture(origin, cudaStreamCaptureModeRelaxed);
  require(cudaStreamBeginCapture(origin, cudaStreamCaptureModeRelaxed) == cudaErrorIllegalState,
          "it captures already");
  require(cudaStreamSynchronize(origin) == cudaErrorStreamCaptureUnsupported, "no wait");
  require(end(origin) == cudaErrorStreamCaptureInvalidated, "which invalidates");
  cudaStreamBeginCapture(origin, cudaStreamCaptureModeRelaxed);
  require(cudaDeviceSynchronize() == cudaErrorStreamCaptureUnsupported, "nor for its device");
  require(end(origin) == cudaErrorStreamCaptureInvalidated, "which invalidates");
  cudaStreamBeginCapture(origin, cudaStreamCaptureModeGlobal);
  std::thread([&] { require(end(origin) == cudaErrorStreamCaptureWrongThread, "thread"); }).join();
  require(end(origin) == cudaSuccess, "and the right thread ends it");
}

void memory_of_a_capture_is_its_graphs() {
  Queue origin;
  void* data = nullptr;
  cudaStreamBeginCapture(origin, cudaStreamCaptureModeGlobal);
  cudaMallocFromPoolAsync(&data, 8, nullptr, origin);
  cudaMemsetAsync(data, 1, 8, origin);
  require(cudaFreeAsync(data, origin) == cudaSuccess, "freed in the graph");
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(origin, &graph);
  cudaGraphExec_t executable = nullptr;
  cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  for (int i = 0; i < 2; ++i) cudaGraphLaunch(executable, origin);
  cudaStreamSynchronize(origin);
  require(*static_cast<char*>(data) == 1, "it was filled, and is there");
  cudaGraphExecDestroy(executable);
}

void a_stream_that_is_destroyed_runs_to_its_end() {
  std::promise<void> go;
  std::promise<void> done;
  {
    Queue queue;
    fake_enqueue(queue, [&] { go.get_future().wait(); });
    fake_enqueue(queue, [&] { done.set_value(); });
  }
  go.set_value();
  done.get_future().wait();
}

void pointers_know_their_device() {
  void* data = nullptr;
  cudaSetDevice(3);
  cudaMalloc(&data, 100);
  cudaSetDevice(0);
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, static_cast<char*>(data) + 99);
  require(attributes.type == cudaMemoryTypeDevice && attributes.device == 3, "a device's");
  cudaPointerGetAttributes(&attributes, &attributes);
  require(attributes.type == cudaMemoryTypeUnregistered, "the host's");
  cudaFree(data);
}

// As "Interactions with the CUDA Driver API" says.
void a_thread_without_a_context_gets_one() {
  CUresult (*set_current)(CUcontext) = nullptr;
  CUresult (*get_current)(CUcontext*) = nullptr;
  cudaGetDriverEntryPointByVersion("cuCtxSetCurrent", reinterpret_cast<void**>(&set_current), 12000,
                                   cudaEnableDefault, nullptr);
  cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", reinterpret_cast<void**>(&get_current), 12000,
                                   cudaEnableDefault, nullptr);
  Mark mark;
  std::thread([&] {
    int device = -1;
    CUcontext none = nullptr;
    const long before = fake_calls_on(0);
    require(cudaGetDevice(&device) == cudaSuccess && device == 0, "the first device is current");
    get_current(&none);
    require(none == nullptr && fake_calls_on(0) == before, "without a context");
    cudaEventQuery(mark);
    CUcontext first = nullptr;
    get_current(&first);
    require(first != nullptr && fake_calls_on(0) == before + 1, "which a query makes");
    cudaSetDevice(2);
    CUcontext second = nullptr;
    get_current(&second);
    require(second != nullptr && second != first, "each device has its own");
    set_current(first);
    require(cudaGetDevice(&device) == cudaSuccess && device == 0, "the device is the context's");
    set_current(nullptr);
    get_current(&none);
    require(none == nullptr && fake_calls_on(0) == before + 1, "it can be taken away");
  }).join();
}

// "API synchronization behavior", Synchronous 1 and Memset.
void synchronous_calls_return_before_the_memory_is_written() {
  std::promise<void> go;
  char data[2] = {0, 0};
  char given = 1;
  fake_enqueue(nullptr, [&] { go.get_future().wait(); });
  cudaMemset(&data[0], 1, 1);
  cudaMemcpy(&data[1], &given, 1, cudaMemcpyHostToDevice);
  given = 2;
  require(data[0] == 0 && data[1] == 0, "nothing is written yet");
  go.set_value();
  cudaStreamSynchronize(nullptr);
  require(data[0] == 1 && data[1] == 1, "what was given is written");
}

void each_device_has_a_default_stream() {
  std::promise<void> go;
  fake_enqueue(nullptr, [&] { go.get_future().wait(); });
  cudaSetDevice(1);
  require(cudaStreamQuery(nullptr) == cudaSuccess, "there is nothing on this device's");
  cudaSetDevice(0);
  require(cudaStreamQuery(nullptr) == cudaErrorNotReady, "there is on the other's");
  go.set_value();
  cudaStreamSynchronize(nullptr);
}

void nothing_is_executed_in_an_instant() {
  Queue queue;
  Mark mark;
  bool ran = false;
  fake_cuda_reset_counts();
  fake_cuda_instant(true);
  fake_enqueue(queue, [&] { ran = true; });
  cudaEventRecord(mark, queue);
  require(cudaEventQuery(mark) == cudaSuccess, "events have fired");
  char word = 0;
  cudaMemsetAsync(&word, 1, 1, queue);
  require(word == 1, "but for words that ranks agree by");
  fake_cuda_instant(false);
  cudaStreamSynchronize(queue);
  require(!ran, "kernels are not run");
  const FakeCudaCounts counts = fake_cuda_counts();
  require(counts.events_recorded == 1 && counts.work == 2 && counts.events_created == 0, "counted");
}

}  // namespace

int main() {
  captured_work_runs_when_its_graph_is_launched();
  an_unjoined_fork_is_an_error();
  a_captured_event_has_no_status();
  work_from_outside_is_no_dependency();
  unsafe_calls();
  nothing_waits_for_a_capturing_stream();
  memory_of_a_capture_is_its_graphs();
  a_stream_that_is_destroyed_runs_to_its_end();
  pointers_know_their_device();
  a_thread_without_a_context_gets_one();
  synchronous_calls_return_before_the_memory_is_written();
  each_device_has_a_default_stream();
  nothing_is_executed_in_an_instant();
  std::puts("good");
  return 0;
}
