#include "comm/windows.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace shardcomm {

void Windows::add(Window window) {
  const std::lock_guard<std::mutex> lock(mutex_);
  windows_.push_back(std::move(window));
}

void Windows::remove(std::uint32_t id) {
  Window released;  // unmapped outside the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(windows_.begin(), windows_.end(),
                                  [id](const Window& window) { return window.id == id; });
  if (found == windows_.end()) return;
  released = std::move(*found);
  windows_.erase(found);
}

Place Windows::find(const void* data, std::size_t bytes, const char* name) const {
  const auto* begin = static_cast<const std::byte*>(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Window& window : windows_) {
    const std::byte* region = window.region(rank_);
    if (begin < region || begin >= region + window.region_bytes) continue;
    const std::size_t offset = static_cast<std::size_t>(begin - region);
    if (offset + bytes > window.region_bytes) {
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

bool Windows::is_shared(const Place& place) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Window* window = by_id(place.window);
  return window != nullptr && window->use == Use::gather;
}

std::byte* Windows::resolve(const Place& place, int rank) const {
  if (place.window == Place::kAddress) return reinterpret_cast<std::byte*>(place.offset);
  const std::lock_guard<std::mutex> lock(mutex_);
  const Window* window = by_id(place.window);
  return window == nullptr ? nullptr : window->region(rank) + place.offset;
}

const Window* Windows::by_id(std::uint32_t id) const {
  const auto found = std::find_if(windows_.begin(), windows_.end(),
                                  [id](const Window& window) { return window.id == id; });
  return found == windows_.end() ? nullptr : &*found;
}

}  // namespace shardcomm
