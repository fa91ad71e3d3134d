// Stores that go past the caches to memory. A run too large to stay in a cache would otherwise read
// every line of its destination only to overwrite it, and evict what compute needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "copy/simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shardcomm {

constexpr std::int64_t kLineBytes = 64;
// From about this size on streaming is faster (measured: copies 1.2 to 1.4 times, casts 1.1 times),
// counting also the core that reads the destination next; below, that core would still find it in
// the shared cache.
constexpr std::int64_t kStreamingRunBytes = std::int64_t{4} << 20;

#if defined(__x86_64__)
// Only few stores can be under way at a time, so wide ones move more bytes.
[[gnu::target("avx2")]] inline void copy_streaming_avx2(std::byte* to, const std::byte* from,
                                                        std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
}

inline void copy_streaming_baseline(std::byte* to, const std::byte* from, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
}
#endif

// Copies `bytes` bytes past the caches. `dst` is aligned to a line and `bytes` is a multiple of a
// line; `src` may lie anywhere. Other threads see the stores after streaming_fence(): on x86 these
// stores are outside the order that a release keeps. Elsewhere they are ordinary ones, and the
// release by which the caller tells others of them is enough.
inline void copy_streaming(std::byte* dst, const std::byte* src, std::int64_t bytes) {
#if defined(__x86_64__)
  const bool wide = instruction_set() != InstructionSet::baseline;
  (wide ? copy_streaming_avx2 : copy_streaming_baseline)(dst, src, bytes);
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
