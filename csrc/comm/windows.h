// Communication memory of one communicator: windows that all ranks map, and how a buffer in them is
// found by a peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/call.h"
#include "comm/mapping.h"

namespace shardcomm {

// How ranks come to see the same memory. Rank 0 makes it and posts a handle; the others open that.
class WindowProvider {
 public:
  virtual ~WindowProvider() = default;
  // Makes memory, which can be opened by the handle as long as what is returned is held.
  virtual std::shared_ptr<void> create(std::size_t bytes, std::uint64_t* handle) = 0;
  virtual std::shared_ptr<Mapping> open(std::uint64_t handle, std::size_t bytes) = 0;
  // Whether a peer can read any address of this rank (threads of one process can).
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

// The windows that there were at one moment. They stay mapped as long as this is held, whatever
// their owners let go of meanwhile.
class WindowTable {
 public:
  WindowTable(int rank, bool shares_addresses, std::vector<Window> windows = {})
      : rank_(rank), shares_addresses_(shares_addresses), windows_(std::move(windows)) {}

  // Where this rank's buffer is for peers. Throws std::invalid_argument if it starts in a window
  // and leaves it.
  Place find(const void* data, std::size_t bytes, const char* name) const;
  // True if `place` lies in the one region that all ranks share.
  bool is_shared(const Place& place) const;
  // Rank `rank`'s buffer, as this rank sees it; nullptr if this rank has let go of the window.
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
      : table_(std::make_shared<const WindowTable>(rank, shares_addresses)) {}

  void add(Window window);
  // Never fails: where there is no memory for a smaller table, the window stays mapped for as long
  // as this.
  void remove(std::uint32_t id) noexcept;
  std::shared_ptr<const WindowTable> now() const;

 private:
  mutable std::mutex mutex_;  // the channels look while an owner of memory lets go of it
  std::shared_ptr<const WindowTable> table_;
};

}  // namespace shardcomm
