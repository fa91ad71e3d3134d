// The part of `local` that is for a device. local.cpp has the part for a CPU.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "comm/executor.h"
#include "comm/mapping.h"

namespace shardcomm {

// What a group of thread ranks needs from the device, or the CPU, on which it works.
struct LocalPlace {
  std::function<std::shared_ptr<Mapping>(std::size_t bytes)> allocate;  // zeroed memory
  std::function<std::unique_ptr<Executor>(int rank)> executor;
};

// Throws CudaError if there is no such device.
LocalPlace place_on_device(int device, int size);

}  // namespace shardcomm
