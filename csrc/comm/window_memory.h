// A rank's share of a window, as the owner of a buffer holds it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "comm/mapping.h"
#include "comm/windows.h"
#include "shardcomm/communicator.h"
#include "stream/fork.h"

namespace shardcomm {

// A share of a window; gives it back when nobody refers to it any more, also after the communicator
// is gone.
class WindowMemory final : public Memory {
 public:
  WindowMemory(std::shared_ptr<Windows> windows, const Window& window, int rank)
      : windows_(std::move(windows)),
        id_(window.id),
        mapping_(window.mapping),
        data_(window.region(rank)),
        bytes_(window.region_bytes) {}
  // In a forked child a thread of the parent's may hold the lock for ever.
  ~WindowMemory() override {
    if (forks() == forks_) windows_->remove(id_);
  }
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;
  void* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }
  int device() const override { return mapping_->device(); }

 private:
  std::shared_ptr<Windows> windows_;
  std::uint32_t id_;
  std::shared_ptr<Mapping> mapping_;
  std::byte* data_;
  std::size_t bytes_;
  const int forks_ = forks();
};

}  // namespace shardcomm
