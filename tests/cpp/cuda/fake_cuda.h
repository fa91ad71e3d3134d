// A CUDA runtime that this process plays: a stream is a thread with a queue, memory is the host's.
// Eight devices, of which each thread has one current.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

void fake_enqueue(cudaStream_t stream, std::function<void()> work);
