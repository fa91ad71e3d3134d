// The encoding loops of block formats by hand for processors with AVX2 and F16C, where compilers
// make much less of block_loops.cpp: the same bits.
//
// Each loop returns after how many blocks it stopped: behind the last one, or before the first that
// needs more care, because of NaN, infinity, a number that saturates, or tiny elements.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "copy/avx2.h"
#include "copy/block_element.h"
#include "copy/block_loops.h"
#include "copy/element.h"
#include "copy/streaming.h"

namespace shardcomm::avx2 {

// The bits of the magnitudes of some elements: the most and the least of those that stood in each
// place of a vector.
template <class Src>
struct Range;

template <>
struct Range<float> {
  __m256i most;
  __m256i least;

  [[gnu::target("avx2,f16c"), gnu::always_inline]] static Range of(const float* group) {
    const Range first = at(group, 0).with(at(group, 1));
    return first.with(at(group, 2).with(at(group, 3)));
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] Range with(const Range& other) const {
    return {larger(most, other.most), _mm256_min_epi32(least, other.least)};
  }
  // As those of a float, here and below.
  [[gnu::target("avx2,f16c"), gnu::always_inline]] std::uint32_t largest() const {
    return largest_of(most);
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] bool all_from(std::uint32_t bits) const {
    const __m256i less = _mm256_cmpgt_epi32(all(bits), least);
    return _mm256_testz_si256(less, less) != 0;
  }

 private:
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static Range at(const float* group, int i) {
    const __m256i magnitudes = _mm256_and_si256(vector_at(group, i), all(kMagnitude));
    return {magnitudes, magnitudes};
  }
};

template <>
struct Range<BFloat16> {
  __m256i most;
  __m256i least;

  [[gnu::target("avx2,f16c"), gnu::always_inline]] static Range of(const BFloat16* group) {
    return at(group, 0).with(at(group, 1));
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] Range with(const Range& other) const {
    return {_mm256_max_epi16(most, other.most), _mm256_min_epi16(least, other.least)};
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] std::uint32_t largest() const {
    const __m128i eight =
        _mm_max_epi16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    // There is an instruction for the least of eight: of the complements.
    const __m128i least_complement = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
    const int complement = _mm_extract_epi16(least_complement, 0);
    return static_cast<std::uint32_t>(0xffff - complement) << 16;
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] bool all_from(std::uint32_t bits) const {
    const __m256i less = _mm256_cmpgt_epi16(all(bits | bits >> 16), least);
    return _mm256_testz_si256(less, less) != 0;
  }

 private:
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static Range at(const BFloat16* group, int i) {
    const __m256i magnitudes = _mm256_and_si256(vector_at(group, i), all(0x7fff7fffu));
    return {magnitudes, magnitudes};
  }
};

// 32 elements with 32 bits each, in the order in which Group<Src> reads them.
struct Wide {
  __m256i at[4];
};

// How 32 elements of type Src are read, and how results are packed to bytes, and these ordered as
// elements are in memory.
template <class Src>
struct Group;

template <>
struct Group<float> {
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static Wide floats(const float* from) {
    return {{vector_at(from, 0), vector_at(from, 1), vector_at(from, 2), vector_at(from, 3)}};
  }
  // An integer beyond a byte becomes the largest or least byte.
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i packed(const Wide& x) {
    return _mm256_packs_epi16(_mm256_packs_epi32(x.at[0], x.at[1]),
                              _mm256_packs_epi32(x.at[2], x.at[3]));
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i ordered(__m256i packed) {
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  // Packed bytes whose upper bits are the elements' signs.
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i signs(const float* from) {
    return packed(floats(from));
  }
  // The packed codes of MxFp8, without signs, of elements that have normal ones. A code is what a
  // float's bits have above those of `origin`, when they are rounded to three of fraction.
  template <bool kTallies>
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i normal_codes(const float* from,
                                                                               std::uint32_t origin,
                                                                               __m256i& error) {
    Wide codes;
    for (int k = 0; k < 4; ++k) {
      const __m256i bits = _mm256_and_si256(vector_at(from, k), all(kMagnitude));
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), all(1));
      const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, all(0x7ffffu)));
      codes.at[k] = _mm256_srli_epi32(_mm256_sub_epi32(rounded, all(origin)), 20);
      if constexpr (kTallies) {
        const __m256i value = _mm256_and_si256(rounded, all(0xfff00000u));
        error = larger(error, distance(bits, value));
      }
    }
    return packed(codes);
  }
};

// Elements 0, 2, ..., 14 of each 16 stand in one vector, and those between in the next.
template <>
struct Group<BFloat16> {
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static Wide floats(const BFloat16* from) {
    const __m256i first = vector_at(from, 0);
    const __m256i second = vector_at(from, 1);
    return {{even(first), odd(first), even(second), odd(second)}};
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i packed(const Wide& x) {
    return _mm256_packs_epi16(interleaved(x.at[0], x.at[1]), interleaved(x.at[2], x.at[3]));
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i ordered(__m256i packed) {
    return _mm256_permute4x64_epi64(packed, 0b11'01'10'00);
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i signs(const BFloat16* from) {
    return _mm256_packs_epi16(vector_at(from, 0), vector_at(from, 1));
  }
  template <bool kTallies>
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i normal_codes(const BFloat16* from,
                                                                               std::uint32_t origin,
                                                                               __m256i& error) {
    // The upper 16 bits of floats have all that bfloat16 has.
    const __m256i narrow_origin = all(origin | origin >> 16);
    __m256i codes[2];
    for (int k = 0; k < 2; ++k) {
      const __m256i bits = _mm256_and_si256(vector_at(from, k), all(0x7fff7fffu));
      const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi16(bits, 4), all(0x00010001u));
      const __m256i rounded = _mm256_add_epi16(bits, _mm256_add_epi16(is_odd, all(0x00070007u)));
      codes[k] = _mm256_srli_epi16(_mm256_sub_epi16(rounded, narrow_origin), 4);
      if constexpr (kTallies) {
        const __m256i value = _mm256_and_si256(rounded, all(0xfff0fff0u));
        error = larger(error, distance(even(bits), even(value)));
        error = larger(error, distance(odd(bits), odd(value)));
      }
    }
    return _mm256_packs_epi16(codes[0], codes[1]);
  }

 private:
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i even(__m256i narrow) {
    return _mm256_slli_epi32(narrow, 16);
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i odd(__m256i narrow) {
    return _mm256_and_si256(narrow, all(0xffff0000u));
  }
  [[gnu::target("avx2,f16c"), gnu::always_inline]] static __m256i interleaved(__m256i even,
                                                                              __m256i odd) {
    return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0b10101010);
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

// Packed codes of MxFp8 with the signs of the elements from which they were made.
template <class Src>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline __m256i with_signs(__m256i codes,
                                                                           const Src* from) {
  return _mm256_or_si256(codes, _mm256_and_si256(Group<Src>::signs(from), all(0x80808080u)));
}

// By value, so that no store of codes can change `run`. `block` is run.block, perhaps as a
// constant.
template <class Code, class Src, bool kTallies>
[[gnu::target("avx2,f16c"), gnu::always_inline]] inline std::int64_t encode_blocks(EncodeRun run,
                                                                                   int block) {
  using Elements = Group<Src>;
  const auto* from = static_cast<const Src*>(run.src);
  std::uint8_t* to = run.codes;
  // The bound grows with the largest element: that of all blocks gives the largest bound.
  std::uint32_t most = 0;
  __m256i seen = _mm256_setzero_si256();
  std::int64_t b = 0;
  for (; b < run.blocks; ++b) {
    fetch_ahead(from, block);
    auto magnitudes = Range<Src>::of(from);
    for (int i = kGroup; i < block; i += kGroup) {
      magnitudes = magnitudes.with(Range<Src>::of(from + i));
    }
    const std::uint32_t largest = magnitudes.largest();
    const std::uint32_t scale = scale_of<Code>(largest);
    // Zeros are zeros in any units.
    const std::uint32_t units = largest == 0 ? kLeastPlainScale : scale;
    if (units < kLeastPlainScale || units > kLargestScale || Code::saturates(largest)) break;
    run.scales[b] = static_cast<std::uint8_t>(scale);
    if constexpr (kTallies) most = largest > most ? largest : most;
    if constexpr (std::is_same_v<Code, MxFp8>) {
      // Usually every element is at least this, and has a normal code: that takes fewer steps.
      const std::uint32_t normal = (units << 23) - (127u << 23) + MxFp8::kLeastPower;
      if (units <= kLargestScale - Code::kMostExponent && magnitudes.all_from(normal)) {
        for (int i = 0; i < block; i += kGroup, from += kGroup, to += kGroup) {
          const __m256i codes =
              Elements::template normal_codes<kTallies>(from, normal - (8u << 20), seen);
          store(to, Elements::ordered(with_signs(codes, from)), run.streaming);
        }
        continue;
      }
    }
    const __m256 factor = _mm256_set1_ps(float_of_bits((254 + Code::kFractionBits - units) << 23));
    __m256i error = _mm256_setzero_si256();
    for (int i = 0; i < block; i += kGroup, from += kGroup, to += kGroup) {
      const Wide x = Elements::floats(from);
      Wide codes;
      for (int k = 0; k < 4; ++k) {
        const Rounded r = rounded(Code{}, _mm256_mul_ps(_mm256_castsi256_ps(x.at[k]), factor));
        codes.at[k] = r.codes;
        if constexpr (kTallies) {
          error = larger(error, _mm256_and_si256(_mm256_castps_si256(r.errors), all(kMagnitude)));
        }
      }
      __m256i packed = Elements::packed(codes);
      if constexpr (std::is_same_v<Code, MxFp8>) packed = with_signs(packed, from);
      store(to, Elements::ordered(packed), run.streaming);
    }
    if constexpr (kTallies) {
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

template <class Code, class Src, bool kTallies>
[[gnu::target("avx2,f16c")]] std::int64_t encode(const EncodeRun& run) {
  // The usual size is a constant of its own loop.
  return run.block == kGroup ? encode_blocks<Code, Src, kTallies>(run, kGroup)
                             : encode_blocks<Code, Src, kTallies>(run, run.block);
}

}  // namespace shardcomm::avx2

#endif
