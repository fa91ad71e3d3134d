// The loops of block formats by hand for processors with AVX2 and F16C, where compilers make much
// less of block_loops.cpp: the same bits.
//
// Each loop returns after how many blocks it stopped: behind the last one, or before the first that
// needs more care, because of NaN, infinity, a number that saturates, or tiny elements.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "copy/block_element.h"
#include "copy/block_loops.h"
#include "copy/element.h"
#include "copy/streaming.h"

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

// 32 elements with 32 bits each, in the order in which Group<Src> reads them.
struct Wide {
  __m256i at[4];
};

// How 32 elements of type Src are read, and how results are narrowed to bytes in memory's order.
template <class Src>
struct Group;

template <>
struct Group<float> {
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static Wide floats(const float* from) {
    return {{vector_at(from, 0), vector_at(from, 1), vector_at(from, 2), vector_at(from, 3)}};
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i magnitudes(const float* from) {
    const Wide x = floats(from);
    const __m256i mask = all(kMagnitude);
    return larger(larger(_mm256_and_si256(x.at[0], mask), _mm256_and_si256(x.at[1], mask)),
                  larger(_mm256_and_si256(x.at[2], mask), _mm256_and_si256(x.at[3], mask)));
  }
  // As bytes in the order of memory; an integer beyond a byte becomes the largest or least byte.
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i bytes(const Wide& x) {
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(x.at[0], x.at[1]),
                                             _mm256_packs_epi32(x.at[2], x.at[3]));
    return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  // Bytes whose upper bits are the elements' signs.
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i signs(const float* from) {
    return bytes(floats(from));
  }
};

// Elements 0, 2, ..., 14 of each 16 stand in one vector, and those between in the next.
template <>
struct Group<BFloat16> {
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static Wide floats(const BFloat16* from) {
    const __m256i first = vector_at(from, 0);
    const __m256i second = vector_at(from, 1);
    const __m256i mask = all(0xffff0000u);
    return {{_mm256_slli_epi32(first, 16), _mm256_and_si256(first, mask),
             _mm256_slli_epi32(second, 16), _mm256_and_si256(second, mask)}};
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i magnitudes(const BFloat16* from) {
    const __m256i mask = all(0x7fff7fffu);
    const __m256i most = _mm256_max_epi16(_mm256_and_si256(vector_at(from, 0), mask),
                                          _mm256_and_si256(vector_at(from, 1), mask));
    return larger(_mm256_slli_epi32(most, 16), _mm256_and_si256(most, all(0xffff0000u)));
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i bytes(const Wide& x) {
    return narrowed(interleaved(x.at[0], x.at[1]), interleaved(x.at[2], x.at[3]));
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i signs(const BFloat16* from) {
    return narrowed(vector_at(from, 0), vector_at(from, 1));
  }

 private:
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i interleaved(__m256i even,
                                                                              __m256i odd) {
    return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0b10101010);
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i narrowed(__m256i first,
                                                                           __m256i second) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0b11'01'10'00);
  }
};

// Eight elements in units of 2^(scale - 127 - kFractionBits), as block_element.h rounds them to
// codes without their signs (of MxInt8 with them), and how far they are from these.
struct Rounded {
  __m256i codes;
  __m256 errors;
};

[[gnu::target("avx2,f16c"), gnu::always_inline]] inline Rounded rounded(MxInt8 /*code*/, __m256 y) {
  const __m256i codes = _mm256_cvtps_epi32(y);
  return {codes, _mm256_sub_ps(y, _mm256_cvtepi32_ps(codes))};
}

[[gnu::target("avx2,f16c"), gnu::always_inline]] inline Rounded rounded(MxFp8 /*code*/, __m256 y) {
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(y), all(kMagnitude));
  const __m256i least = all(MxFp8::kLeastPower);
  const __m256i power = larger(_mm256_and_si256(magnitude, all(kInfinityBits)), least);
  const __m256i before = _mm256_srli_epi32(_mm256_sub_epi32(power, least), 20);
  const __m256i origin = _mm256_add_epi32(power, all(20u << 23));
  const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(origin));
  const __m256i steps = _mm256_sub_epi32(_mm256_castps_si256(sum), origin);
  return {_mm256_add_epi32(before, steps),
          _mm256_sub_ps(_mm256_castsi256_ps(magnitude),
                        _mm256_sub_ps(sum, _mm256_castsi256_ps(origin)))};
}

// Asks for a block that is encoded later: a block has so many instructions that the processor would
// not come to its loads in time. A prefetch of an address without memory does nothing.
template <class Src>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline void fetch_ahead(const Src* block,
                                                                         int elements) {
  constexpr std::uintptr_t kAhead = 2048;
  const std::uintptr_t later = reinterpret_cast<std::uintptr_t>(block) + kAhead;
  for (std::uintptr_t i = 0; i < elements * sizeof(Src); i += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(later + i), _MM_HINT_T0);
  }
}

template <class Code, class Src, bool kTallies>
[[gnu::target("avx2,f16c")]] std::int64_t encode(const EncodeRun& run) {
  using Elements = Group<Src>;
  const auto* from = static_cast<const Src*>(run.src);
  std::uint8_t* to = run.codes;
  // The bound grows with the largest element: that of all blocks gives the largest bound.
  std::uint32_t most = 0;
  __m256i seen = _mm256_setzero_si256();
  std::int64_t b = 0;
  for (; b < run.blocks; ++b) {
    fetch_ahead(from, run.block);
    __m256i magnitudes = Elements::magnitudes(from);
    for (int i = kGroup; i < run.block; i += kGroup) {
      magnitudes = larger(magnitudes, Elements::magnitudes(from + i));
    }
    const std::uint32_t largest = largest_of(magnitudes);
    const std::uint32_t scale = scale_of<Code>(largest);
    // Zeros are zeros in any units.
    const std::uint32_t units = largest == 0 ? kLeastPlainScale : scale;
    if (units < kLeastPlainScale || units > kLargestScale || Code::saturates(largest)) break;
    run.scales[b] = static_cast<std::uint8_t>(scale);
    const __m256 factor = _mm256_set1_ps(float_of_bits((254 + Code::kFractionBits - units) << 23));
    __m256i error = _mm256_setzero_si256();
    for (int i = 0; i < run.block; i += kGroup, from += kGroup, to += kGroup) {
      const Wide x = Elements::floats(from);
      Wide codes;
      for (int k = 0; k < 4; ++k) {
        const Rounded r = rounded(Code{}, _mm256_mul_ps(_mm256_castsi256_ps(x.at[k]), factor));
        codes.at[k] = r.codes;
        if constexpr (kTallies) {
          error = larger(error, _mm256_and_si256(_mm256_castps_si256(r.errors), all(kMagnitude)));
        }
      }
      __m256i bytes = Elements::bytes(codes);
      if constexpr (std::is_same_v<Code, MxFp8>) {
        bytes = _mm256_or_si256(bytes, _mm256_and_si256(Elements::signs(from), all(0x80808080u)));
      }
      store(to, bytes, run.streaming);
    }
    if constexpr (kTallies) {
      most = largest > most ? largest : most;
      const __m256 unit = _mm256_set1_ps(float_of_bits((units - Code::kFractionBits) << 23));
      const __m256 difference = _mm256_mul_ps(_mm256_castsi256_ps(error), unit);
      seen = larger(seen, _mm256_castps_si256(difference));
    }
  }
  if (kTallies && b > 0) {
    run.tally->raise(Code::bound(most, scale_of<Code>(most), false), largest_of(seen));
  }
  return b;
}

// Reads a group's codes as floats. Times factor_of(scale) they are the elements, for scales at
// which is_plain holds.
template <class Code>
struct Codes;

template <>
struct Codes<MxInt8> {
  static float factor_of(std::uint32_t scale) {
    return float_of_bits((scale - MxInt8::kFractionBits) << 23);
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static bool have_nan(
      const std::uint8_t* /*codes*/) {
    return false;
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static bool are_zeros(
      const std::uint8_t* codes) {
    return _mm256_testz_si256(vector_at(codes, 0), vector_at(codes, 0)) != 0;
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static void read(const std::uint8_t* codes,
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
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static bool have_nan(const std::uint8_t* codes) {
    const __m256i nan = all(0x7f7f7f7fu);
    const __m256i magnitudes = _mm256_and_si256(vector_at(codes, 0), nan);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitudes, nan)) != 0;
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static bool are_zeros(
      const std::uint8_t* codes) {
    return _mm256_testz_si256(vector_at(codes, 0), all(0x7f7f7f7fu)) != 0;
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static void read(const std::uint8_t* codes,
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
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline void put(float* to, const __m256 (&x)[4],
                                                                 bool streaming) {
  for (int k = 0; k < 4; ++k) store(to + 8 * k, _mm256_castps_si256(x[k]), streaming);
}

// Floats that are bfloat16's, too.
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline void put(BFloat16* to, const __m256 (&x)[4],
                                                                 bool streaming) {
  for (int k = 0; k < 4; k += 2) {
    const __m256i mixed = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(x[k]), 16),
                                              _mm256_srli_epi32(_mm256_castps_si256(x[k + 1]), 16));
    store(to + 8 * k, _mm256_permute4x64_epi64(mixed, 0b11'01'10'00), streaming);
  }
}

// Blocks of zeros have scale 0, and are zeros in any units.
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline std::uint32_t units_of(
    std::uint32_t scale) {
  return scale > kLeastPlainScale ? scale : kLeastPlainScale;
}

// Whether the loop by hand serves a block in every part. Its elements are multiples of 2^-96 then,
// so that no sum is subnormal.
template <class Code>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline bool is_plain(const DecodeRun& run,
                                                                      std::int64_t block) {
  for (int part = 0; part < run.parts; ++part) {
    const std::uint32_t scale = run.scales[part * run.stride + block];
    const std::uint8_t* codes = run.codes + part * run.stride + block * run.block;
    if (scale > kLargestScale - Code::kMostExponent) return false;
    for (int i = 0; i < run.block; i += kGroup) {
      if (Codes<Code>::have_nan(codes + i)) return false;
      if (scale < kLeastPlainScale && !Codes<Code>::are_zeros(codes + i)) return false;
    }
  }
  return true;
}

// 32 elements from `first` on of a block of a part.
template <class Code>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline void read(const DecodeRun& run, int part,
                                                                  std::int64_t block, int first,
                                                                  __m256 (&x)[4]) {
  const std::uint8_t* codes = run.codes + part * run.stride + block * run.block + first;
  const std::uint32_t scale = run.scales[part * run.stride + block];
  const __m256 factor = _mm256_set1_ps(Codes<Code>::factor_of(units_of(scale)));
  Codes<Code>::read(codes, x);
  for (int k = 0; k < 4; ++k) x[k] = _mm256_mul_ps(x[k], factor);
}

template <class Code, class Dst>
[[gnu::target("avx2,f16c")]] std::int64_t decode(const DecodeRun& run) {
  auto* to = static_cast<Dst*>(run.dst);
  const bool streaming = run.streaming && reinterpret_cast<std::uintptr_t>(to) % kVectorBytes == 0;
  const __m256 scale = _mm256_set1_ps(run.scale);
  for (std::int64_t b = 0; b < run.blocks; ++b) {
    if (!is_plain<Code>(run, b)) return b;
    for (int i = 0; i < run.block; i += kGroup, to += kGroup) {
      __m256 sums[4];
      int part = 0;
      if (run.adds) {
        for (int k = 0; k < 4; ++k)
          sums[k] = _mm256_loadu_ps(reinterpret_cast<const float*>(to) + 8 * k);
      } else {
        read<Code>(run, part++, b, i, sums);
      }
      for (; part < run.parts; ++part) {
        __m256 more[4];
        read<Code>(run, part, b, i, more);
        for (int k = 0; k < 4; ++k) sums[k] = _mm256_add_ps(sums[k], more[k]);
      }
      if constexpr (std::is_same_v<Dst, float>) {
        for (int k = 0; k < 4; ++k) sums[k] = _mm256_mul_ps(scale, sums[k]);
      }
      put(to, sums, streaming);
    }
  }
  return run.blocks;
}

}  // namespace shardcomm::avx2

#endif
