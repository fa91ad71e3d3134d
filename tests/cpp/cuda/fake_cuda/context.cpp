// Devices and their primary contexts, after the sections Device Management and "Interactions with
// the CUDA Driver API" of the CUDA Runtime API documentation: a call that needs a context, in a
// thread that has none, makes that of the current device. Which calls those are is said nowhere;
// here it is all that are not about the process or about a device that they name.
#include <cuda.h>

#include <array>
#include <string>

#include "fake_cuda/runtime.h"

struct CUctx_st {};

namespace fake {

thread_local int current_device = 0;

namespace {

thread_local bool has_context = false;
std::array<CUctx_st, kFakeDevices> contexts;
std::array<std::atomic<long>, kFakeDevices> calls;

CUresult get_current(CUcontext* context) {
  *context = has_context ? &contexts[static_cast<std::size_t>(current_device)] : nullptr;
  return CUDA_SUCCESS;
}

// A thread without a context is as it was at its start.
CUresult set_current(CUcontext context) {
  has_context = context != nullptr;
  current_device = has_context ? static_cast<int>(context - contexts.data()) : 0;
  return CUDA_SUCCESS;
}

}  // namespace

void use_context() {
  has_context = true;
  ++calls[static_cast<std::size_t>(current_device)];
}

}  // namespace fake

long fake_calls_on(int device) { return fake::calls[static_cast<std::size_t>(device)]; }

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kFakeDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = fake::current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kFakeDevices) return fake::fail(cudaErrorInvalidDevice);
  fake::current_device = device;
  fake::use_context();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  *function = nullptr;
  if (symbol == std::string("cuCtxGetCurrent")) {
    *function = reinterpret_cast<void*>(&fake::get_current);
  } else if (symbol == std::string("cuCtxSetCurrent")) {
    *function = reinterpret_cast<void*>(&fake::set_current);
  }
  return cudaSuccess;
}

}  // extern "C"
