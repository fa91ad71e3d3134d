// A CUDA runtime that this process plays: a stream is a thread with a queue, memory is the host's.
// Sixty-four devices, of which each thread has one current. The runtime's source is not public:
// what is played is what the named sections of NVIDIA's CUDA Runtime API documentation say.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

constexpr int kFakeDevices = 64;

// Puts `work` on a stream as a kernel would be: a stream that captures records it and does not run
// it.
void fake_enqueue(cudaStream_t stream, std::function<void()> work);
bool fake_is_capturing(cudaStream_t stream);

// Nothing that is put on a stream is executed, and every event has fired: what is left is the
// caller's own time. FAKE_CUDA_INSTANT=1 in the environment does the same.
void fake_cuda_instant(bool instant);

// How many calls have used the context of `device`, and so have made it if it was not there.
long fake_calls_on(int device);

// This thread's next cudaEventRecord fails, as after an error of the device: cudaErrorUnknown.
void fake_fail_next_record();

// What was called, by all threads, since the last reset.
struct FakeCudaCounts {
  long events_created = 0;
  long timed_events_created = 0;
  long events_recorded = 0;
  long event_queries = 0;
  long allocations = 0;  // cudaMalloc, cudaMallocFromPoolAsync
  long work = 0;         // put on streams: copies, fills, kernels
};
FakeCudaCounts fake_cuda_counts();
void fake_cuda_reset_counts();

// Called with what cudaFree, cudaFreeAsync (when its turn has come) and ncclMemFree give back.
void fake_on_free(std::function<void(const void*)> observer);
