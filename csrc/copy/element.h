// The way from one stored element to the value that one computes with (a float for the narrow
// types), and back. Conversions to the narrow types round to nearest even and keep NaN a NaN. They
// are written without branches, so that a loop over them becomes vector code on every instruction
// set; CUDA has instructions of its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "shardcomm/tile.h"

#ifdef __CUDA_ARCH__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace shardcomm {

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline std::uint32_t float_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline float float_of_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <class T>
[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline T load(T x) {
  return x;
}

[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline float load(BFloat16 x) {
  return float_of_bits(static_cast<std::uint32_t>(x.bits) << 16);
}

[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline float load(Half x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  constexpr std::uint32_t kRebias = (127 - 15) << 23;
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + kRebias;
  const std::uint32_t infinite_or_nan = normal + kRebias;
  // Below the first normal number, the bits count steps of 2^-24.
  const std::uint32_t subnormal =
      float_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t finite = magnitude < 0x0400u ? subnormal : normal;
  return float_of_bits(sign | (magnitude < 0x7c00u ? finite : infinite_or_nan));
#endif
}

template <class T>
[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline void store(T& to, T x) {
  to = x;
}

[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline void store(BFloat16& to, float x) {
#ifdef __CUDA_ARCH__
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to.bits = static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded);
#endif
}

[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline void store(Half& to, float x) {
#ifdef __CUDA_ARCH__
  to.bits = __half_as_ushort(__float2half_rn(x));
#else
  constexpr std::uint32_t kRebias = (127 - 15) << 23;
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Rounding may carry into the exponent, and from the largest exponent into infinity, as it
  // should.
  const std::uint32_t normal = (magnitude - kRebias + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // The last place of numbers around 0.5 is 2^-24, the step of subnormal halves: the addition
  // rounds for us.
  const std::uint32_t subnormal = float_bits(float_of_bits(magnitude) + 0.5f) - float_bits(0.5f);
  const std::uint32_t infinite_or_nan = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  to.bits = static_cast<std::uint16_t>(
      sign | (magnitude < 0x47800000u ? finite : infinite_or_nan));  // 2^16
#endif
}

}  // namespace shardcomm
