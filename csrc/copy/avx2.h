// Vectors of 32 bytes, for processors with AVX2 and F16C.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "copy/block_element.h"

namespace shardcomm::avx2 {

constexpr std::uintptr_t kVectorBytes = 32;

[[gnu::target("avx2,f16c"), gnu::always_inline]] inline __m256i all(std::uint32_t bits) {
  return _mm256_set1_epi32(static_cast<int>(bits));
}

[[gnu::target("avx2,f16c"), gnu::always_inline]] inline __m256i vector_at(const void* from, int i) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from) + i);
}

// A streaming store faults unless `to` is aligned to 32 bytes.
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline void store(void* to, __m256i x,
                                                                   bool streaming) {
  if (streaming) {
    _mm256_stream_si256(static_cast<__m256i*>(to), x);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(to), x);
  }
}

// Of bits without a sign, which have the order of integers.
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline __m256i larger(__m256i a, __m256i b) {
  return _mm256_max_epi32(a, b);
}

[[gnu::target("avx2,f16c"), gnu::always_inline]] inline std::uint32_t largest_of(__m256i eight) {
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01'00'11'10));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b10'11'00'01));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
}

// The magnitude of the difference of two vectors of floats, all given as bits.
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline __m256i distance(__m256i a, __m256i b) {
  const __m256 difference = _mm256_sub_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
  return _mm256_and_si256(_mm256_castps_si256(difference), all(kMagnitude));
}

}  // namespace shardcomm::avx2

#endif
