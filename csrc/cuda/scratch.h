// Device memory that lasts as long as an operation, in stream order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace shardcomm {

// A private pool. It grows to the most memory that is in use at once, and keeps that. If one stream
// gives memory back, another stream gets it only when the first is done with it; the driver sees to
// that. No host waits, and it works in a graph capture.
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

// Memory for work that is put on `stream` while this object lives.
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
