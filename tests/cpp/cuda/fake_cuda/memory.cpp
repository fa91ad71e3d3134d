// Memory of the devices: the host's, in 256-byte units, each piece known with its device.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "fake_cuda/runtime.h"

namespace fake {
namespace {

// What is this small is copied and filled even where nothing is executed: words that ranks agree
// by.
constexpr std::size_t kWord = 256;

struct Piece {
  std::size_t bytes;
  int device;
};
struct Pieces {
  std::mutex mutex;
  std::map<const char*, Piece> all;
  std::function<void(const void*)> observer;
};
Pieces& pieces() {
  static Pieces& instance = *std::make_unique<Pieces>().release();
  return instance;
}

void on_default_stream(std::function<void()> work) {
  instant() ? work() : stream_of(nullptr).push(std::move(work));
}

}  // namespace

void* allocate(std::size_t bytes) {
  const std::size_t whole = (std::max<std::size_t>(bytes, 1) + 255) / 256 * 256;
  void* data = std::aligned_alloc(256, whole);
  const std::lock_guard<std::mutex> lock(pieces().mutex);
  pieces().all[static_cast<const char*>(data)] = {whole, current_device};
  return data;
}

void release(void* data) {
  if (data == nullptr) return;
  std::function<void(const void*)> observer;
  {
    const std::lock_guard<std::mutex> lock(pieces().mutex);
    pieces().all.erase(static_cast<const char*>(data));
    observer = pieces().observer;
  }
  if (observer) observer(data);
  std::free(data);
}

}  // namespace fake

void fake_on_free(std::function<void(const void*)> observer) {
  const std::lock_guard<std::mutex> lock(fake::pieces().mutex);
  fake::pieces().observer = std::move(observer);
}

extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  fake::use_context();
  if (const cudaError_t refused = fake::refuse_unsafe()) return refused;
  ++fake::counters.allocations;
  *data = fake::allocate(bytes);
  return cudaSuccess;
}
// Waits for the device and is unsafe beside a capture, but does not conflict with one: NCCL frees
// so (alloc.h, ncclCudaFree).
cudaError_t cudaFree(void* data) {
  fake::use_context();
  if (data == nullptr) return cudaSuccess;
  if (const cudaError_t refused = fake::refuse_unsafe()) return refused;
  fake::wait_for_device();
  fake::release(data);
  return cudaSuccess;
}
// In a capture the memory is the graph's.
cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t,
                                    cudaStream_t stream) {
  fake::use_context();
  ++fake::counters.allocations;
  *data = fake::allocate(bytes);
  fake::keep_captured(fake::stream_of(stream), *data);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  fake::use_context();
  CUstream_st& on = fake::stream_of(stream);
  if (fake::instant()) {
    fake::release(data);
  } else if (fake::is_capturing(on)) {
    return fake::owns_captured(on, data) ? cudaSuccess : fake::fail(cudaErrorInvalidValue);
  } else {
    on.push([data] { fake::release(data); });
  }
  return cudaSuccess;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t*, const cudaMemPoolProps*) {
  fake::use_context();
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) {
  fake::use_context();
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

// "API synchronization behavior": both go through the default stream, and may return before the
// memory of the device has its contents; so they do here.
cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  fake::use_context();
  if (const cudaError_t refused = fake::refuse_unsafe()) return refused;
  fake::on_default_stream([=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  fake::use_context();
  if (const cudaError_t refused = fake::refuse_unsafe()) return refused;
  if (kind == cudaMemcpyHostToDevice) {
    const auto* begin = static_cast<const char*>(from);
    const std::vector<char> staged(begin, begin + bytes);
    fake::on_default_stream([=] { std::memcpy(to, staged.data(), bytes); });
    return cudaSuccess;
  }
  fake::on_default_stream([=] { std::memcpy(to, from, bytes); });
  return kind == cudaMemcpyDeviceToDevice ? cudaSuccess : cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  if (fake::instant() && bytes <= fake::kWord) std::memset(data, value, bytes);
  return fake::put(fake::stream_of(stream), [=] { std::memset(data, value, bytes); });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (fake::instant() && bytes <= fake::kWord) std::memcpy(to, from, bytes);
  return fake::put(fake::stream_of(stream), [=] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  fake::use_context();
  if (const cudaError_t refused = fake::refuse_unsafe()) return refused;
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  fake::use_context();
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -2;  // what the driver says of the host's memory
  const std::lock_guard<std::mutex> lock(fake::pieces().mutex);
  const auto& all = fake::pieces().all;
  auto after = all.upper_bound(static_cast<const char*>(pointer));
  if (after == all.begin()) return cudaSuccess;
  const auto& [begin, piece] = *--after;
  if (static_cast<const char*>(pointer) >= begin + piece.bytes) return cudaSuccess;
  attributes->type = cudaMemoryTypeDevice;
  attributes->device = piece.device;
  attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

}  // extern "C"
