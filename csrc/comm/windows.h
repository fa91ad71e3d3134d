// The communication memory of one communicator: windows that all ranks map, and how a peer finds a
// buffer in them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/call.h"
#include "comm/mapping.h"

namespace shardcomm {

// Gives ranks the same memory. Rank 0 makes it and posts a handle, by which the other ranks open
// it.
class WindowProvider {
 public:
  virtual ~WindowProvider() = default;
  // Makes memory. It can be opened by the handle as long as the returned object lives.
  virtual std::shared_ptr<void> create(std::size_t bytes, std::uint64_t* handle) = 0;
  virtual std::shared_ptr<Mapping> open(std::uint64_t handle, std::size_t bytes) = 0;
  // Whether a peer can read any address of this rank, as threads of one process can.
  virtual bool shares_addresses() const = 0;
};

// gather: one region for all.     [ slice 0 | slice 1 | ... ]
// reduce: one region for each.    [ region of rank 0 ][ region of rank 1 ] ...   `stride` apart
struct Window {
  std::uint32_t id = 0;
  Use use = Use::gather;
  std::shared_ptr<Mapping> mapping;
  std::size_t region_bytes = 0;
  std::size_t stride = 0;  // gather: 0

  std::byte* region(int rank) const {
    return mapping->data() + stride * static_cast<std::size_t>(rank);
  }
};

// The windows that there were at one moment. They stay mapped as long as the table lives, even if
// their owners release them meanwhile.
class WindowTable {
 public:
  WindowTable(int rank, bool shares_addresses, std::vector<Window> windows = {})
      : rank_(rank), shares_addresses_(shares_addresses), windows_(std::move(windows)) {}

  // The place of this rank's buffer for peers. Throws std::invalid_argument if the buffer starts in
  // a window and ends outside of it.
  Place find(const void* data, std::size_t bytes, const char* name) const;
  // The same for a buffer that must be this rank's own: it throws if the buffer lies in a region
  // that all ranks share.
  Place find_own(const void* data, std::size_t bytes, const char* name) const;
  // Whether `place` lies in a region that all ranks share.
  bool is_shared(const Place& place) const;
  // The buffer of `rank` as this rank sees it; nullptr if this rank has released the window.
  std::byte* resolve(const Place& place, int rank) const;

  WindowTable with(Window window) const;
  WindowTable without(std::uint32_t id) const;

 private:
  const Window* by_id(std::uint32_t id) const;

  int rank_;
  bool shares_addresses_;
  std::vector<Window> windows_;
};

class Windows {
 public:
  Windows(int rank, bool shares_addresses)
      : rank_(rank),
        shares_addresses_(shares_addresses),
        table_(std::make_shared<const WindowTable>(rank, shares_addresses)) {}

  void add(Window window);
  // Never fails: if there is no memory for a smaller table, the window stays mapped as long as this
  // object lives.
  void remove(std::uint32_t id) noexcept;
  std::shared_ptr<const WindowTable> now() const;
  // As the table's of now. Of a buffer that lies beyond all windows they need no lock, which would
  // be a tenth of a small collective's time.
  Place find(const void* data, std::size_t bytes, const char* name) const {
    return may_hold(data) ? now()->find(data, bytes, name) : elsewhere(data);
  }
  Place find_own(const void* data, std::size_t bytes, const char* name) const {
    return may_hold(data) ? now()->find_own(data, bytes, name) : elsewhere(data);
  }
  bool is_shared(const Place& place) const { return place.in_window() && now()->is_shared(place); }

 private:
  bool may_hold(const void* data) const {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return address >= lowest_.load(std::memory_order_relaxed) &&
           address < highest_.load(std::memory_order_relaxed);
  }
  Place elsewhere(const void* data) const {
    if (!shares_addresses_) return {};
    return {Place::kAddress, reinterpret_cast<std::uint64_t>(data)};
  }

  const int rank_;
  const bool shares_addresses_;
  // All windows lie between them, and have ever lain. Relaxed: who was given a buffer in a window
  // knows of the window.
  std::atomic<std::uintptr_t> lowest_{UINTPTR_MAX};
  std::atomic<std::uintptr_t> highest_{0};
  mutable std::mutex mutex_;  // channels look while an owner of memory releases it
  std::shared_ptr<const WindowTable> table_;
};

}  // namespace shardcomm
