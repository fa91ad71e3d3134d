// Stream capture and graphs, after the sections Stream Management and Graph Management of the CUDA
// Runtime API documentation, and "Prohibited and Unhandled Operations" of the programming guide.
// A launched graph runs its nodes one after the other, in the order of their capture.
#include <algorithm>
#include <utility>

#include "fake_cuda/runtime.h"

struct CUgraph_st {
  std::shared_ptr<fake::Recording> recording;
};
struct CUgraphExec_st {
  std::shared_ptr<fake::Recording> recording;
};
struct CUuserObject_st {
  std::shared_ptr<void> object;
};

namespace fake {
namespace {

struct Captures {
  std::mutex mutex;
  std::vector<std::shared_ptr<Capture>> active;
  std::atomic<int> count{0};  // of `active`: so that nothing is locked where nobody captures
  unsigned long long made = 0;
};
Captures& captures() {
  static Captures& instance = *std::make_unique<Captures>().release();
  return instance;
}
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool nobody_captures() { return captures().count.load() == 0; }

void unite(std::vector<std::size_t>& tail, const std::vector<std::size_t>& other) {
  for (const std::size_t node : other) {
    if (std::find(tail.begin(), tail.end(), node) == tail.end()) tail.push_back(node);
  }
}

// Whether this thread may not make unsafe calls on account of `capture`
// (cudaThreadExchangeStreamCaptureMode).
bool prohibits(const Capture& capture) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  const bool own = capture.thread == std::this_thread::get_id();
  if (own) return capture.mode != cudaStreamCaptureModeRelaxed;
  return thread_mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
}

// Nodes of which the origin stream does not come after.
bool unjoined(const Capture& capture) {
  const auto& nodes = capture.recording->nodes;
  std::vector<bool> joined(nodes.size());
  std::vector<std::size_t> open = capture.origin->captured.tail;
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (joined[node]) continue;
    joined[node] = true;
    open.insert(open.end(), nodes[node].after.begin(), nodes[node].after.end());
  }
  return std::find(joined.begin(), joined.end(), false) != joined.end();
}

}  // namespace

Recording::~Recording() {
  for (void* data : memory) release(data);
}

bool is_capturing(CUstream_st& stream) {
  if (nobody_captures()) return false;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  return stream.captured.capture != nullptr;
}

cudaError_t put(CUstream_st& stream, std::function<void()> work) {
  use_context();
  ++counters.work;
  if (!nobody_captures()) {
    const std::lock_guard<std::mutex> lock(captures().mutex);
    if (auto& [capture, tail] = stream.captured; capture) {
      if (capture->invalidated) return fail(cudaErrorStreamCaptureInvalidated);
      auto& nodes = capture->recording->nodes;
      nodes.push_back({std::move(work), tail});
      tail = {nodes.size() - 1};
      return cudaSuccess;
    }
  }
  if (!instant()) stream.push(std::move(work));
  return cudaSuccess;
}

Captured captured_on(CUstream_st& stream) {
  if (nobody_captures()) return {};
  const std::lock_guard<std::mutex> lock(captures().mutex);
  return stream.captured;
}

bool wait_captured(CUstream_st& stream, const Captured& event, bool recorded, cudaError_t& error) {
  if (nobody_captures() && !event.capture) return false;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  auto& [capture, tail] = stream.captured;
  if (!event.capture) {
    if (!capture) return false;
    // The stream would depend on work outside of the capture.
    if (recorded) {
      capture->invalidated = true;
      error = fail(cudaErrorStreamCaptureIsolation);
    }
    return true;
  }
  if (event.capture->ended) {
    error = fail(cudaErrorCapturedEvent);
  } else if (!capture) {
    capture = event.capture;  // a fork: this stream joins the capture
    tail = event.tail;
    capture->streams.insert(&stream);
  } else if (capture == event.capture) {
    unite(tail, event.tail);
  } else {
    capture->invalidated = event.capture->invalidated = true;
    error = fail(cudaErrorStreamCaptureMerge);
  }
  return true;
}

void invalidate(const Captured& event) {
  const std::lock_guard<std::mutex> lock(captures().mutex);
  event.capture->invalidated = true;
}

cudaError_t refuse_unsafe() {
  if (nobody_captures()) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  cudaError_t error = cudaSuccess;
  for (const auto& capture : captures().active) {
    if (!prohibits(*capture)) continue;
    capture->invalidated = true;
    error = fail(cudaErrorStreamCaptureUnsupported);
  }
  return error;
}

cudaError_t refuse_captured(CUstream_st& stream) {
  if (nobody_captures()) return cudaSuccess;
  {
    const std::lock_guard<std::mutex> lock(captures().mutex);
    if (stream.captured.capture) {
      stream.captured.capture->invalidated = true;
      return fail(cudaErrorStreamCaptureUnsupported);
    }
  }
  return refuse_unsafe();
}

cudaError_t refuse_device(int device) {
  if (nobody_captures()) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  cudaError_t error = cudaSuccess;
  for (const auto& capture : captures().active) {
    for (const CUstream_st* stream : capture->streams) {
      if (stream->device != device) continue;
      capture->invalidated = true;
      error = fail(cudaErrorStreamCaptureUnsupported);
    }
  }
  return error;
}

bool keep_captured(CUstream_st& stream, void* data) {
  if (nobody_captures()) return false;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  if (!stream.captured.capture) return false;
  stream.captured.capture->recording->memory.push_back(data);
  return true;
}

bool owns_captured(CUstream_st& stream, void* data) {
  if (nobody_captures()) return false;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  if (!stream.captured.capture) return false;
  const auto& memory = stream.captured.capture->recording->memory;
  return std::find(memory.begin(), memory.end(), data) != memory.end();
}

}  // namespace fake

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  fake::use_context();
  std::swap(*mode, fake::thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  fake::use_context();
  if (stream == nullptr) return fake::fail(cudaErrorStreamCaptureUnsupported);
  fake::Captures& all = fake::captures();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (stream->captured.capture) return fake::fail(cudaErrorIllegalState);
  auto capture = std::make_shared<fake::Capture>();
  capture->origin = stream;
  capture->thread = std::this_thread::get_id();
  capture->mode = mode;
  capture->id = ++all.made;
  capture->streams.insert(stream);
  capture->graph = std::make_shared<CUgraph_st>(CUgraph_st{capture->recording});
  stream->captured = {capture, {}};
  all.active.push_back(std::move(capture));
  ++all.count;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  fake::use_context();
  *graph = nullptr;
  fake::Captures& all = fake::captures();
  std::shared_ptr<fake::Capture> capture;
  std::shared_ptr<fake::Recording> recording;  // without a graph, it goes after the lock
  const std::lock_guard<std::mutex> lock(all.mutex);
  capture = stream->captured.capture;
  if (!capture) return fake::fail(cudaErrorIllegalState);
  if (capture->origin != stream) return fake::fail(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return fake::fail(cudaErrorStreamCaptureWrongThread);
  }
  const bool is_unjoined = fake::unjoined(*capture);
  for (CUstream_st* each : capture->streams) each->captured = {};
  capture->ended = true;
  recording = std::move(capture->recording);  // events that were recorded in it do not keep it
  capture->graph->recording = nullptr;
  all.active.erase(std::find(all.active.begin(), all.active.end(), capture));
  --all.count;
  if (capture->invalidated) return fake::fail(cudaErrorStreamCaptureInvalidated);
  if (is_unjoined) return fake::fail(cudaErrorStreamCaptureUnjoined);
  *graph = std::make_unique<CUgraph_st>(CUgraph_st{recording}).release();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  fake::use_context();
  *status = cudaStreamCaptureStatusNone;
  if (fake::nobody_captures()) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(fake::captures().mutex);
  if (const auto& capture = fake::stream_of(stream).captured.capture) {
    *status =
        capture->invalidated ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  }
  return cudaSuccess;
}

// Of the graph's nodes nothing is told.
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, size_t*) {
#endif
  const cudaError_t error = cudaStreamIsCapturing(stream, status);
  if (*status == cudaStreamCaptureStatusActive) {
    const std::lock_guard<std::mutex> lock(fake::captures().mutex);
    const auto& capture = fake::stream_of(stream).captured.capture;
    if (id != nullptr) *id = capture->id;
    if (graph != nullptr) *graph = capture->graph.get();
  }
  return error;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy,
                                 unsigned, unsigned) {
  *object = std::make_unique<CUuserObject_st>(CUuserObject_st{{data, destroy}}).release();
  return cudaSuccess;
}

// The caller's reference goes to the graph (cudaGraphUserObjectMove).
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                      unsigned) {
  const std::unique_ptr<CUuserObject_st> moved(object);
  graph->recording->objects.push_back(moved->object);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  fake::use_context();
  *executable = std::make_unique<CUgraphExec_st>(CUgraphExec_st{graph->recording}).release();
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  if (fake_is_capturing(stream)) return fake::fail(cudaErrorNotSupported);  // child graphs
  return fake::put(fake::stream_of(stream), [recording = executable->recording] {
    const std::lock_guard<std::mutex> lock(recording->running);
    for (const auto& node : recording->nodes) node.work();
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  std::unique_ptr<CUgraph_st>(graph).reset();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  std::unique_ptr<CUgraphExec_st>(executable).reset();
  return cudaSuccess;
}

}  // extern "C"
