// What tags stand for, as long as it was said: sentences about calls then say it instead of a
// number. Plain memory, which processes may share; zero is empty.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "stream/futex.h"

namespace shardcomm {

struct TagNames {
  // Tags that a communicator hands out under a name; callers' own are others.
  static constexpr std::int64_t kFirst = std::int64_t{1} << 32;
  static constexpr std::int64_t kMost = 1024;  // later ones keep their number
  static constexpr std::size_t kBytes = 124;

  struct Name {
    Atomic<std::uint32_t> bytes;  // written last; 0: no name
    char text[kBytes];
  };
  Name names[kMost];

  // Once for each tag, by one thread of all.
  void set(std::int64_t tag, std::string_view name) {
    if (tag < kFirst || tag - kFirst >= kMost) return;
    std::size_t bytes = std::min(name.size(), kBytes);
    if (bytes < name.size()) {  // whole characters of UTF-8
      while (bytes > 0 && (static_cast<unsigned char>(name[bytes]) & 0xc0) == 0x80) --bytes;
    }
    Name& own = names[tag - kFirst];
    std::memcpy(own.text, name.data(), bytes);
    own.bytes.store(static_cast<std::uint32_t>(bytes), std::memory_order_release);
  }

  std::string of(std::int64_t tag) const {
    if (tag < kFirst || tag - kFirst >= kMost) return "";
    const Name& own = names[tag - kFirst];
    return {own.text, own.bytes.load(std::memory_order_acquire)};
  }
};

}  // namespace shardcomm
