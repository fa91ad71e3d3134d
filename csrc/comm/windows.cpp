#include "comm/windows.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardcomm {

Place WindowTable::find(const void* data, std::size_t bytes, const char* name) const {
  const auto* begin = static_cast<const std::byte*>(data);
  for (const Window& window : windows_) {
    const std::byte* region = window.region(rank_);
    if (begin < region || begin >= region + window.region_bytes) continue;
    const std::size_t offset = static_cast<std::size_t>(begin - region);
    if (bytes > window.region_bytes - offset) {
      throw std::invalid_argument(std::string(name) + " starts at byte " + std::to_string(offset) +
                                  " of communication memory of " +
                                  std::to_string(window.region_bytes) + " bytes and is " +
                                  std::to_string(bytes) + " bytes long; it must end inside");
    }
    return {window.id, offset};
  }
  if (shares_addresses_) return {Place::kAddress, reinterpret_cast<std::uint64_t>(data)};
  return {};
}

Place WindowTable::find_own(const void* data, std::size_t bytes, const char* name) const {
  const Place place = find(data, bytes, name);
  if (!is_shared(place)) return place;
  throw std::invalid_argument(std::string(name) +
                              " is in communication memory that all ranks share (allocate for use "
                              "'gather'); it must be a rank's own: allocate it for use 'reduce', "
                              "or as any other memory");
}

bool WindowTable::is_shared(const Place& place) const {
  const Window* window = by_id(place.window);
  return window != nullptr && window->use == Use::gather;
}

std::byte* WindowTable::resolve(const Place& place, int rank) const {
  if (place.window == Place::kAddress) return reinterpret_cast<std::byte*>(place.offset);
  const Window* window = by_id(place.window);
  return window == nullptr ? nullptr : window->region(rank) + place.offset;
}

const Window* WindowTable::by_id(std::uint32_t id) const {
  const auto found = std::find_if(windows_.begin(), windows_.end(),
                                  [id](const Window& window) { return window.id == id; });
  return found == windows_.end() ? nullptr : &*found;
}

WindowTable WindowTable::with(Window window) const {
  WindowTable more = *this;
  more.windows_.push_back(std::move(window));
  return more;
}

WindowTable WindowTable::without(std::uint32_t id) const {
  WindowTable less(rank_, shares_addresses_);
  std::copy_if(windows_.begin(), windows_.end(), std::back_inserter(less.windows_),
               [id](const Window& window) { return window.id != id; });
  return less;
}

void Windows::add(Window window) {
  const auto begin = reinterpret_cast<std::uintptr_t>(window.region(rank_));
  const std::uintptr_t end = begin + window.region_bytes;
  const std::lock_guard<std::mutex> lock(mutex_);
  table_ = std::make_shared<const WindowTable>(table_->with(std::move(window)));
  lowest_.store(std::min(lowest_.load(std::memory_order_relaxed), begin),
                std::memory_order_relaxed);
  highest_.store(std::max(highest_.load(std::memory_order_relaxed), end),
                 std::memory_order_relaxed);
}

void Windows::remove(std::uint32_t id) noexcept {
  std::shared_ptr<const WindowTable> before;  // what it alone held is unmapped outside the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    before = std::exchange(table_, std::make_shared<const WindowTable>(table_->without(id)));
  } catch (const std::bad_alloc&) {
  }
}

std::shared_ptr<const WindowTable> Windows::now() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return table_;
}

}  // namespace shardcomm
