// The names of tags. Sentences about calls say a tag's name, if it has one, instead of its number.
// It is plain memory, which processes may share; zeroed memory has no names.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "stream/futex.h"

namespace shardcomm {

struct TagNames {
  // The first tag that a communicator hands out under a name. Callers' own tags are smaller.
  static constexpr std::int64_t kFirst = std::int64_t{1} << 32;
  static constexpr std::int64_t kMost = 1024;  // sentences call later tags by their number
  static constexpr std::size_t kBytes = 124;

  struct Name {
    // Written last and read first (release, acquire); 0: the tag has no name yet.
    Atomic<std::uint32_t> bytes;
    char text[kBytes];
  };
  static constexpr std::uint32_t kWriting = ~std::uint32_t{0};  // instead of a name's bytes
  Name names[kMost];

  // Names a tag, unless it has a name. All ranks give a tag the same name: the first to come
  // writes.
  void set(std::int64_t tag, std::string_view name) {
    if (tag < kFirst || tag - kFirst >= kMost) return;
    std::size_t bytes = std::min(name.size(), kBytes);
    if (bytes < name.size()) {  // cut the name between two characters of UTF-8
      while (bytes > 0 && (static_cast<unsigned char>(name[bytes]) & 0xc0) == 0x80) --bytes;
    }
    Name& own = names[tag - kFirst];
    std::uint32_t nobody = 0;
    if (!own.bytes.compare_exchange_strong(nobody, kWriting)) return;
    std::memcpy(own.text, name.data(), bytes);
    own.bytes.store(static_cast<std::uint32_t>(bytes), std::memory_order_release);
  }

  std::string of(std::int64_t tag) const {
    if (tag < kFirst || tag - kFirst >= kMost) return "";
    const Name& own = names[tag - kFirst];
    const std::uint32_t bytes = own.bytes.load(std::memory_order_acquire);
    return bytes == kWriting ? "" : std::string(own.text, bytes);
  }
};

}  // namespace shardcomm
