// Stores that go past the caches to memory. A run too large to stay in a cache would otherwise read
// every line of its destination only to overwrite it, and evict what compute needs.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace shardcomm {

constexpr std::int64_t kLineBytes = 64;
// From about this size on streaming is faster (measured: copies 1.2 to 1.4 times, casts 1.1 times),
// counting also the core that reads the destination next; below, that core would still find it in
// the shared cache.
constexpr std::int64_t kStreamingRunBytes = std::int64_t{4} << 20;

// Copies `bytes` bytes past the caches. `dst` is aligned to a line and `bytes` is a multiple of a
// line; `src` may lie anywhere. Other threads see the stores after streaming_fence(): on x86 these
// stores are outside the order that a release keeps. Elsewhere they are ordinary ones, and the
// release by which the caller tells others of them is enough.
inline void copy_streaming(void* dst, const void* src, std::int64_t bytes) {
#if defined(__x86_64__)
  auto* to = static_cast<__m128i*>(dst);
  const auto* from = static_cast<const __m128i*>(src);
  constexpr std::int64_t kLineVectors = kLineBytes / sizeof(__m128i);
  for (std::int64_t line = 0; line < bytes / kLineBytes; ++line) {
    for (std::int64_t i = 0; i < kLineVectors; ++i) {
      _mm_stream_si128(to + line * kLineVectors + i,
                       _mm_loadu_si128(from + line * kLineVectors + i));
    }
  }
#else
  std::memcpy(dst, src, static_cast<std::size_t>(bytes));
#endif
}

inline void streaming_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace shardcomm
