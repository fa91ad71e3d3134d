// What the core puts around CUDA's runtime: devices, memory, events and streams, in any thread.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "abi/handles.h"
#include "cuda/runtime.h"
#include "cuda/scratch.h"
#include "fake_cuda.h"
#include "shardcomm/stream.h"

namespace {

using namespace shardcomm;

constexpr int kDevice = 5;

void require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim);
  std::_Exit(1);
}

int current_device() {
  int device = -1;
  cudaGetDevice(&device);
  return device;
}

// A thread that has not called CUDA before, and that uses no device but `kDevice`.
void in_a_fresh_thread(const char* what, const std::function<void()>& call) {
  const long before = fake_calls_on(0);
  std::thread(call).join();
  require(fake_calls_on(0) == before, what);
}

void a_scope_leaves_a_thread_as_it_was() {
  in_a_fresh_thread("a scope makes no context on device 0", [] {
    const long before = fake_calls_on(kDevice);
    {
      const DeviceScope scope(kDevice);
      require(current_device() == kDevice, "it is current in the scope");
      const DeviceScope inner(kDevice + 1);
      require(current_device() == kDevice + 1, "so is that of an inner scope");
    }
    require(fake_calls_on(kDevice) > before, "it has a context there");
    require(current_device() == 0, "and afterwards is where it began");
  });
  in_a_fresh_thread("another device", [] {
    cudaSetDevice(3);
    {
      const DeviceScope scope(kDevice);
    }
    require(current_device() == 3, "the device before is current again");
  });
}

void what_any_thread_may_call_uses_its_own_device_alone() {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<Event> begin, end;
  std::unique_ptr<DeviceMemory> memory;
  std::unique_ptr<ScratchPool> pool;
  OwnedEvent event;
  in_a_fresh_thread("to make them", [&] {
    stream = make_cuda_stream(kDevice);
    begin = stream->record(true);
    end = stream->record(true);
    memory = std::make_unique<DeviceMemory>(kDevice, 8);
    pool = std::make_unique<ScratchPool>(kDevice);
    const DeviceScope scope(kDevice);
    event = make_event();
  });
  in_a_fresh_thread("to ask whether a stream captures", [&] { stream->capturing(); });
  in_a_fresh_thread("to record", [&] { stream->record(); });
  in_a_fresh_thread("to have a stream wait", [&] { stream->wait(begin); });
  in_a_fresh_thread("to query", [&] { begin->query(); });
  in_a_fresh_thread("to wait", [&] { end->wait(); });
  in_a_fresh_thread("to tell the time", [&] { end->seconds_since(*begin); });
  in_a_fresh_thread("to let go of a stream", [&] { stream = nullptr; });
  in_a_fresh_thread("to let go of events", [&] { begin = end = nullptr; });
  in_a_fresh_thread("to destroy an event", [&] { event = nullptr; });
  in_a_fresh_thread("to free memory", [&] { memory = nullptr; });
  in_a_fresh_thread("to free a pool", [&] { pool = nullptr; });
}

void memory_has_its_contents_on_return() {
  DeviceMemory memory(kDevice, 100);
  auto* data = static_cast<unsigned char*>(memory.data());
  std::vector<unsigned char> given(memory.bytes());
  std::iota(given.begin(), given.end(), 1);
  const auto occupy_the_default_stream = [] {
    const DeviceScope scope(kDevice);
    fake_enqueue(nullptr, [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  };
  occupy_the_default_stream();
  memory.copy_from_host(given.data());
  require(std::equal(given.begin(), given.end(), data), "it is a copy");
  occupy_the_default_stream();
  memory.fill_with_zeros();
  require(std::vector<unsigned char>(data, data + 100) == std::vector<unsigned char>(100), "zeros");
}

// As where Python lets go of a copy plan.
void memory_is_freed_beside_a_capture() {
  for (const bool own : {true, false}) {
    auto memory = std::make_unique<DeviceMemory>(kDevice, 8);
    const DeviceScope scope(kDevice);
    const auto stream = make_cuda_stream(kDevice);
    auto* origin = static_cast<cudaStream_t>(stream->native());
    bool freed = false;
    fake_on_free([&](const void*) { freed = true; });
    cudaStreamBeginCapture(origin, cudaStreamCaptureModeGlobal);
    own ? memory.reset() : std::thread([&] { memory.reset(); }).join();
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(origin, &graph) == cudaSuccess, "the capture ends well");
    require(freed, "and the memory is freed");
    fake_on_free({});
    cudaGraphDestroy(graph);
  }
}

void a_stream_of_no_device_is_refused() {
  for (const int device : {-1, kFakeDevices}) {
    const auto is_refused = [device](const auto& make) {
      try {
        make();
      } catch (const std::invalid_argument& error) {
        return error.what() ==
               "device is " + std::to_string(device) + "; this process has 64 GPUs, counted from 0";
      }
      return false;
    };
    require(is_refused([&] { make_cuda_stream(device); }), "a new one is refused");
    require(is_refused([&] { borrow_cuda_stream(device, nullptr); }), "so is a borrowed one");
  }
}

void no_stream_is_the_default_one_of_the_device() {
  in_a_fresh_thread("the default stream of another device", [] {
    bool ran = false;
    abi::run_on(nullptr, kDevice, [&](NativeStream stream) {
      ran = stream == nullptr && current_device() == kDevice;
    });
    require(ran, "it runs there");
    abi::run_on(nullptr, abi::kHost, [&](NativeStream) { ran = current_device() == 0; });
    require(ran, "and what is of the host, anywhere");
  });
}

}  // namespace

int main() {
  a_scope_leaves_a_thread_as_it_was();
  what_any_thread_may_call_uses_its_own_device_alone();
  memory_has_its_contents_on_return();
  memory_is_freed_beside_a_capture();
  a_stream_of_no_device_is_refused();
  no_stream_is_the_default_one_of_the_device();
  std::puts("good");
  return 0;
}
