// The decoding loops of block formats by hand for processors with AVX2, F16C and FMA, where
// compilers make much less of block_loops.cpp: the same bits.
//
// Each loop returns after how many blocks it stopped: behind the last one, or before the first that
// needs more care, because of NaN, infinity, or tiny elements.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "copy/avx2.h"
#include "copy/block_element.h"
#include "copy/block_loops.h"
#include "copy/element.h"

namespace shardcomm::avx2 {

// Reads a group's codes as floats. Times factor_of(scale) they are the elements, for scales at
// which is_plain holds.
template <class Code>
struct Codes;

template <>
struct Codes<MxInt8> {
  static float factor_of(std::uint32_t scale) {
    return float_of_bits((scale - MxInt8::kFractionBits) << 23);
  }
  [[gnu::target("avx2,f16c,fma"), gnu::always_inline]] static bool have_nan(
      const std::uint8_t* /*codes*/) {
    return false;
  }
  [[gnu::target("avx2,f16c,fma"), gnu::always_inline]] static bool are_zeros(
      const std::uint8_t* codes) {
    return _mm256_testz_si256(vector_at(codes, 0), vector_at(codes, 0)) != 0;
  }
  [[gnu::target("avx2,f16c,fma"), gnu::always_inline]] static void read(const std::uint8_t* codes,
                                                                        __m256 (&x)[4]) {
    for (int k = 0; k < 4; ++k) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * k));
      x[k] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
    }
  }
};

// An E4M3's bits, shifted, are a half: it has one more bit of exponent and seven more of fraction,
// and its value is 2^-8 of the code's. The conversion of halves takes subnormal ones as they are,
// whatever the processor is set to.
template <>
struct Codes<MxFp8> {
  static float factor_of(std::uint32_t scale) { return float_of_bits((scale + 8) << 23); }
  [[gnu::target("avx2,f16c,fma"), gnu::always_inline]] static bool have_nan(
      const std::uint8_t* codes) {
    const __m256i nan = all(0x7f7f7f7fu);
    const __m256i magnitudes = _mm256_and_si256(vector_at(codes, 0), nan);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitudes, nan)) != 0;
  }
  [[gnu::target("avx2,f16c,fma"), gnu::always_inline]] static bool are_zeros(
      const std::uint8_t* codes) {
    return _mm256_testz_si256(vector_at(codes, 0), all(0x7f7f7f7fu)) != 0;
  }
  [[gnu::target("avx2,f16c,fma"), gnu::always_inline]] static void read(const std::uint8_t* codes,
                                                                        __m256 (&x)[4]) {
    for (int k = 0; k < 4; k += 2) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 8 * k));
      const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
      const __m256i halves = _mm256_and_si256(shifted, all(0xbfffbfffu));  // without a second sign
      x[k] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      x[k + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
  }
};

// 32 elements in the order of memory.
[[gnu::target("avx2,f16c,fma"), gnu::always_inline]] inline void put(float* to,
                                                                     const __m256 (&x)[4],
                                                                     bool streaming) {
  for (int k = 0; k < 4; ++k) store(to + 8 * k, _mm256_castps_si256(x[k]), streaming);
}

// Floats that are bfloat16's, too.
[[gnu::target("avx2,f16c,fma"), gnu::always_inline]] inline void put(BFloat16* to,
                                                                     const __m256 (&x)[4],
                                                                     bool streaming) {
  for (int k = 0; k < 4; k += 2) {
    const __m256i mixed = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(x[k]), 16),
                                              _mm256_srli_epi32(_mm256_castps_si256(x[k + 1]), 16));
    store(to + 8 * k, _mm256_permute4x64_epi64(mixed, 0b11'01'10'00), streaming);
  }
}

// Blocks of zeros have scale 0, and are zeros in any units.
[[gnu::target("avx2,f16c,fma"), gnu::always_inline]] inline std::uint32_t units_of(
    std::uint32_t scale) {
  return scale > kLeastPlainScale ? scale : kLeastPlainScale;
}

// Whether the loop by hand serves a block in every part. Its elements are multiples of 2^-96 then,
// so that no sum is subnormal.
template <class Code>
[[gnu::target("avx2,f16c,fma"), gnu::always_inline]] inline bool is_plain(const DecodeRun& run,
                                                                          std::int64_t block,
                                                                          int elements) {
  for (int part = 0; part < run.parts; ++part) {
    const std::uint32_t scale = run.scales[part * run.stride + block];
    const std::uint8_t* codes = run.codes + part * run.stride + block * elements;
    // At the scale of the largest elements the code -128, which no encoder writes, is infinite.
    if (scale >= kLargestScale - Code::kMostExponent) return false;
    for (int i = 0; i < elements; i += kGroup) {
      if (Codes<Code>::have_nan(codes + i)) return false;
      if (scale < kLeastPlainScale && !Codes<Code>::are_zeros(codes + i)) return false;
    }
  }
  return true;
}

// 32 elements of block `block` of a part, from the part's element `first` on: codes as floats, and
// what these are times `factor`.
struct Factored {
  __m256 codes[4];
  __m256 factor;
};

template <class Code>
[[gnu::target("avx2,f16c,fma"), gnu::always_inline]] inline Factored read(const DecodeRun& run,
                                                                          int part,
                                                                          std::int64_t block,
                                                                          std::int64_t first) {
  const std::uint32_t scale = run.scales[part * run.stride + block];
  Factored elements;
  elements.factor = _mm256_set1_ps(Codes<Code>::factor_of(units_of(scale)));
  Codes<Code>::read(run.codes + part * run.stride + first, elements.codes);
  return elements;
}

// By value, so that no store of elements can change `run`. `block` is run.block, perhaps as a
// constant.
template <class Code, class Dst>
[[gnu::target("avx2,f16c,fma"), gnu::always_inline]] inline std::int64_t decode_blocks(
    DecodeRun run, int block) {
  auto* to = static_cast<Dst*>(run.dst);
  const bool streaming = run.streaming && reinterpret_cast<std::uintptr_t>(to) % kVectorBytes == 0;
  const __m256 scale = _mm256_set1_ps(run.scale);
  for (std::int64_t b = 0; b < run.blocks; ++b) {
    if (!is_plain<Code>(run, b, block)) return b;
    for (int i = 0; i < block; i += kGroup, to += kGroup) {
      __m256 sums[4];
      int part = 0;
      if (run.adds) {
        for (int k = 0; k < 4; ++k)
          sums[k] = _mm256_loadu_ps(reinterpret_cast<const float*>(to) + 8 * k);
      } else {
        const Factored part_0 = read<Code>(run, part++, b, b * block + i);
        for (int k = 0; k < 4; ++k) sums[k] = _mm256_mul_ps(part_0.codes[k], part_0.factor);
      }
      for (; part < run.parts; ++part) {
        const Factored more = read<Code>(run, part, b, b * block + i);
        // The product is exact: one rounding is that of the addition.
        for (int k = 0; k < 4; ++k) {
          sums[k] = _mm256_fmadd_ps(more.codes[k], more.factor, sums[k]);
        }
      }
      if constexpr (std::is_same_v<Dst, float>) {
        for (int k = 0; k < 4; ++k) sums[k] = _mm256_mul_ps(scale, sums[k]);
      }
      put(to, sums, streaming);
    }
  }
  return run.blocks;
}

template <class Code, class Dst>
[[gnu::target("avx2,f16c,fma")]] std::int64_t decode(const DecodeRun& run) {
  // The usual size is a constant of its own loop.
  return run.block == kGroup ? decode_blocks<Code, Dst>(run, kGroup)
                             : decode_blocks<Code, Dst>(run, run.block);
}

}  // namespace shardcomm::avx2

#endif
