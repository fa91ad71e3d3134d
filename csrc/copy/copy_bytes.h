// Copies of bytes as they are, for runs that may be long.
#pragma once

#include <cstddef>
#include <cstring>

namespace shardcomm {

// Below, every memcpy uses vectors.
constexpr std::size_t kLongCopyBytes = 2048;

#if defined(__x86_64__)
// memcpy by vectors of AVX2, which the CPU must have.
void copy_by_vectors(void* dst, const void* src, std::size_t bytes);
#endif

// Whether copy_past_caches() differs from memcpy.
#if defined(__x86_64__)
constexpr bool kHasStreamingStores = true;
#else
constexpr bool kHasStreamingStores = false;
#endif

// memcpy that takes the whole lines of `dst` past the caches on x86: for what another core reads
// next, or for what is too large for them.
void copy_past_caches(void* dst, const void* src, std::size_t bytes);

// memcpy of at least kLongCopyBytes.
void copy_long(void* dst, const void* src, std::size_t bytes);

// memcpy, without a weakness of glibc before 2.39. On AMD's processors since Zen 3 glibc copies 4
// KiB to about 1 MiB by `rep movsb`. That takes up to 20 times as long as vectors where the source
// begins at a boundary of pages and the destination 16 bytes behind one, where malloc puts large
// arrays (https://sourceware.org/bugzilla/show_bug.cgi?id=30994).
inline void copy_bytes(void* dst, const void* src, std::size_t bytes) {
  if (bytes < kLongCopyBytes) {
    std::memcpy(dst, src, bytes);
  } else {
    copy_long(dst, src, bytes);
  }
}

}  // namespace shardcomm
