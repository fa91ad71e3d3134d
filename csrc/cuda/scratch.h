// Device memory for the time of an operation, in stream order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace shardcomm {

// A private pool: it grows to what is in use at once and keeps that. Memory that one stream gave
// back another gets only when the first is done with it, which the driver sees to; nothing waits on
// the host, and it works in a graph capture.
class ScratchPool {
 public:
  explicit ScratchPool(int device);
  ~ScratchPool();
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;
  cudaMemPool_t get() const { return pool_; }

 private:
  int device_;
  cudaMemPool_t pool_ = nullptr;
};

// Valid for what is put on `stream` during its life.
class Scratch {
 public:
  Scratch(const ScratchPool& pool, std::size_t bytes, cudaStream_t stream);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  cudaStream_t stream_;
  void* data_ = nullptr;
};

}  // namespace shardcomm
