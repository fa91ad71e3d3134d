// The arithmetic of elements that share a scale, on a CPU and on CUDA: from a block's largest
// element to its scale, from an element to its code, and back (shardcomm/blocks.h).
//
// All of it is exact but for the one rounding to a code. Subnormal numbers are never factors,
// operands or results of floating-point operations that matter, since a processor may be set to
// take them for zero. Blocks of tiny elements, with scales below kLeastPlainScale, go a way of
// their own for that: there, subnormal elements are converted from their bits, which count steps of
// 2^-149.
#pragma once

#include <cstdint>

#include "copy/element.h"
#include "shardcomm/blocks.h"

namespace shardcomm {

constexpr std::uint32_t kNanScale = 255;
constexpr std::int32_t kLargestScale = 254;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;
constexpr std::uint32_t kMagnitude = 0x7fffffffu;
constexpr std::uint32_t kQuietNan = 0x7fc00000u;
// From here on, subnormal elements round to zero in any rounding, and all factors are normal.
constexpr std::uint32_t kLeastPlainScale = 40;

[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE constexpr std::uint32_t power_bits(int exponent) {
  return exponent >= -126 ? static_cast<std::uint32_t>(exponent + 127) << 23
                          : std::uint32_t{1} << (exponent + 149);
}

// A code, and how far it is from the element, in the units in which it was rounded.
struct RoundedElement {
  std::uint32_t code;  // its low 8 bits
  float error;
};

// Whether a fraction in [0, 1) rounds up. It does so for floor(fraction * 2^24) of the 2^24 equally
// likely values of the upper bits of `random`.
[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline std::int32_t rounds_up(float fraction,
                                                                           std::uint32_t random) {
  const auto threshold = static_cast<std::int32_t>(fraction * 0x1p24f);
  return threshold > static_cast<std::int32_t>(random >> 8) ? 1 : 0;
}

// An element format: `round` takes an element in units of 2^(s - 127 - kFractionBits), `value`
// returns it in these.
struct MxInt8 {
  static constexpr int kFractionBits = 6;
  // The largest code is 2^kMostExponent * (1 + kMostMantissa * 2^-23), in units of the scale.
  static constexpr int kMostExponent = 0;
  static constexpr std::uint32_t kMostMantissa = 0x7e0000u;
  // The largest subnormal float that is at most 127 / 64 * 2^-127.
  static constexpr std::uint32_t kMostAtScaleZero = 0x7f0000u;

  template <bool kStochastic>
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static RoundedElement round(float y,
                                                                           std::uint32_t random) {
    std::int32_t code;
    if constexpr (kStochastic) {
      const auto toward_zero = static_cast<std::int32_t>(y);
      const float fraction = y - static_cast<float>(toward_zero);
      const std::int32_t away = rounds_up(fraction < 0 ? -fraction : fraction, random);
      code = y < 0 ? toward_zero - away : toward_zero + away;
    } else {
      // The last place of numbers around 1.5 * 2^23 is 1: the addition rounds to nearest even.
      code = static_cast<std::int32_t>(float_bits(y + 0x1.8p23f) - float_bits(0x1.8p23f));
    }
    // Integers, which have vector instructions for it. It matters at the largest scale alone.
    code = code > 127 ? 127 : code;
    code = code < -127 ? -127 : code;
    return {static_cast<std::uint32_t>(code), y - static_cast<float>(code)};
  }
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static float value(std::uint8_t code) {
    return static_cast<float>(static_cast<std::int8_t>(code));
  }
  // Whether a block's largest element is above the largest code.
  SHARDCOMM_HOST_DEVICE static bool saturates(std::uint32_t largest) {
    return largest > (std::uint32_t{kLargestScale} << 23 | kMostMantissa);
  }
  SHARDCOMM_HOST_DEVICE static std::uint32_t bound(std::uint32_t largest, std::uint32_t scale,
                                                   bool stochastic) {
    const int step = static_cast<int>(scale) - 133;
    return power_bits(stochastic || saturates(largest) ? step : step - 1);
  }
};

struct MxFp8 {
  static constexpr int kFractionBits = 0;
  static constexpr int kMostExponent = 8;
  static constexpr std::uint32_t kMostMantissa = 0x600000u;
  static constexpr std::uint32_t kMostAtScaleZero = 0;  // every subnormal float is less
  // Steps are an eighth of the element's power of two, and at least an eighth of this one.
  static constexpr std::uint32_t kLeastPower = (127 - 6) << 23;

  template <bool kStochastic>
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static RoundedElement round(float y,
                                                                           std::uint32_t random) {
    const std::uint32_t bits = float_bits(y);
    const std::uint32_t sign = bits >> 31 << 7;
    const float magnitude = float_of_bits(bits & kMagnitude);
    const std::uint32_t own = bits & kInfinityBits;
    const std::uint32_t power = own > kLeastPower ? own : kLeastPower;
    // A code counts 8 steps for each power of two. 16 steps are 8 of the next: the addition
    // carries.
    const std::uint32_t before = (power - kLeastPower) >> 20;
    if constexpr (kStochastic) {
      const float steps = magnitude * float_of_bits((257u << 23) - power);
      const auto down = static_cast<std::int32_t>(steps);
      const std::int32_t whole = down + rounds_up(steps - static_cast<float>(down), random);
      const float error = steps - static_cast<float>(whole);
      return {(before + static_cast<std::uint32_t>(whole)) | sign,
              error * float_of_bits(power - (3u << 23))};
    } else {
      // The last place of numbers around 2^20 powers is a step: the addition rounds to nearest
      // even.
      const std::uint32_t origin = power + (20u << 23);
      const float sum = magnitude + float_of_bits(origin);
      return {(before + (float_bits(sum) - origin)) | sign,
              magnitude - (sum - float_of_bits(origin))};
    }
  }
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static float value(std::uint8_t code) {
    const std::uint32_t magnitude = code & 0x7fu;
    const std::uint32_t normal = (magnitude << 20) + ((127 - 7) << 23);
    const std::uint32_t subnormal =
        float_bits(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
    const std::uint32_t finite = magnitude < 8 ? subnormal : normal;
    const std::uint32_t sign =
        static_cast<std::uint32_t>(static_cast<std::int8_t>(code)) & ~kMagnitude;
    return float_of_bits((magnitude == 0x7f ? kQuietNan : finite) | sign);
  }
  SHARDCOMM_HOST_DEVICE static bool saturates(std::uint32_t /*largest*/) { return false; }
  SHARDCOMM_HOST_DEVICE static std::uint32_t bound(std::uint32_t largest, std::uint32_t scale,
                                                   bool stochastic) {
    const std::uint32_t shift = stochastic ? 3 : 4;
    // largest * 2^-shift, rounded up where it is subnormal: there, bits count steps of 2^-149.
    const std::uint32_t exponent = largest >> 23;
    std::uint32_t relative = largest - (shift << 23);
    if (exponent <= shift) {
      const std::uint32_t in_steps =
          exponent == 0 ? largest : ((largest & 0x7fffffu) | 0x800000u) << (exponent - 1);
      relative = (in_steps + (1u << shift) - 1) >> shift;
    }
    const std::uint32_t absolute = power_bits(static_cast<int>(scale) - (stochastic ? 136 : 137));
    return relative > absolute ? relative : absolute;
  }
};

// The scale of a block whose largest magnitude has these bits.
template <class Code>
[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline std::uint32_t scale_of(std::uint32_t largest) {
  const auto exponent =
      static_cast<std::int32_t>((largest + (0x7fffffu - Code::kMostMantissa)) >> 23) -
      Code::kMostExponent;
  const std::int32_t least = exponent < 0 || largest <= Code::kMostAtScaleZero ? 0 : exponent;
  const std::int32_t finite = least > kLargestScale ? kLargestScale : least;
  return largest >= kInfinityBits ? kNanScale : static_cast<std::uint32_t>(finite);
}

// An element of a block, in units of 2^(scale - 127 - kFractionBits).
template <class Code>
class PlainUnits {
 public:
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE explicit PlainUnits(std::uint32_t scale)
      : factor_(float_of_bits((254 + Code::kFractionBits - scale) << 23)) {}
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE float operator()(float x) const {
    return x * factor_;
  }

 private:
  float factor_;
};

// The same for scales below kLeastPlainScale.
template <class Code>
class TinyUnits {
 public:
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE explicit TinyUnits(std::uint32_t scale)
      : normal_(float_of_bits((254 + Code::kFractionBits - 64 - scale) << 23)),
        subnormal_(float_of_bits((254 + Code::kFractionBits - 149 - scale) << 23)) {}
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE float operator()(float x) const {
    const std::uint32_t bits = float_bits(x);
    const std::uint32_t magnitude = bits & kMagnitude;
    const float normal = (float_of_bits(magnitude) * 0x1p64f) * normal_;
    const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * subnormal_;
    const std::uint32_t result = float_bits(magnitude < 0x800000u ? subnormal : normal);
    return float_of_bits(result | (bits & ~kMagnitude));
  }

 private:
  float normal_;
  float subnormal_;
};

// From units of 2^(scale - 127 - kFractionBits) to a float, for finite numbers of which that is
// exact.
template <class Code>
class PlainValues {
 public:
  static constexpr bool kFewBits = true;  // values are bf16's, too
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE explicit PlainValues(std::uint32_t scale)
      : factor_(
            float_of_bits(scale == kNanScale ? kQuietNan : (scale - Code::kFractionBits) << 23)) {}
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE float operator()(float y) const {
    return y * factor_;
  }

 private:
  float factor_;
};

template <class Code>
class TinyValues {
 public:
  static constexpr bool kFewBits = false;
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE explicit TinyValues(std::uint32_t scale)
      : in_steps_(float_of_bits((scale + 149 - Code::kFractionBits) << 23)),
        normal_(float_of_bits((scale + 64 - Code::kFractionBits) << 23)) {}
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE float operator()(float y) const {
    const std::uint32_t bits = float_bits(y);
    const float magnitude = float_of_bits(bits & kMagnitude);
    // Below 2^24 steps of 2^-149, the bits of a float are their number.
    const float steps = magnitude * in_steps_;
    const bool is_normal = !(steps < 0x1p24f);
    const auto subnormal =
        static_cast<std::uint32_t>(static_cast<std::int32_t>(is_normal ? 0.0f : steps));
    const std::uint32_t normal = float_bits((magnitude * normal_) * 0x1p-64f);
    return float_of_bits((is_normal ? normal : subnormal) | (bits & ~kMagnitude));
  }

 private:
  float in_steps_;
  float normal_;
};

// What one thread has seen of the blocks that it encoded.
struct BlockTally {
  std::uint32_t bound = 0;
  std::uint32_t seen = 0;
  std::int32_t flagged = 0;

  // Takes note of a block with this largest element and this largest difference in units.
  template <class Code>
  SHARDCOMM_HOST_DEVICE void add(std::uint32_t largest, std::uint32_t scale, float error,
                                 bool stochastic) {
    if (scale == kNanScale) {
      ++flagged;
      return;
    }
    raise(Code::bound(largest, scale, stochastic),
          float_bits(scale < kLeastPlainScale ? TinyValues<Code>(scale)(error)
                                              : PlainValues<Code>(scale)(error)));
  }

  SHARDCOMM_HOST_DEVICE void raise(std::uint32_t block_bound, std::uint32_t block_seen) {
    bound = block_bound > bound ? block_bound : bound;
    seen = block_seen > seen ? block_seen : seen;
  }
};

}  // namespace shardcomm
