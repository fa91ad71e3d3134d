#include "copy/block_loops.h"

#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "copy/block_decode_avx2.h"
#include "copy/block_encode_avx2.h"
#include "copy/nonfinite.h"
#include "copy/philox.h"
#include "copy/reduce_element.h"
#include "copy/simd.h"

namespace shardcomm {
namespace {

template <class Code, class Src, bool kStochastic, bool kTallies>
struct Encode {
  [[gnu::always_inline]] static void run(EncodeRun run) {
    // The usual size is a constant of its own loops.
    run.block == kGroup ? encode_all(run, kGroup) : encode_all(run, run.block);
  }

 private:
  static constexpr int kBatch = 16;

  [[gnu::always_inline]] static void encode_all(const EncodeRun& run, int block) {
    for (std::int64_t first = 0; first < run.blocks; first += kBatch) {
      encode_batch(run, block, first, static_cast<int>(smaller(kBatch, run.blocks - first)));
    }
  }

  // In steps, each of which is the same for several blocks: no block waits for another.
  [[gnu::always_inline]] static void encode_batch(const EncodeRun& run, int block,
                                                  std::int64_t first, int blocks) {
    const auto* from = static_cast<const Src*>(run.src) + first * block;
    std::uint32_t largest_of_block[kBatch] = {};
    std::uint32_t scales[kBatch];
    for (int i = 0; i < blocks; ++i) largest_of_block[i] = largest_of(from + i * block, block);
    for (int i = 0; i < kBatch; ++i) scales[i] = scale_of<Code>(largest_of_block[i]);
    std::uint8_t* codes = run.codes + first * block;
    for (int i = 0; i < blocks; ++i, from += block, codes += block) {
      const std::int64_t b = first + i;
      const std::uint32_t largest = largest_of_block[i];
      const std::uint32_t scale = scales[i];
      run.scales[b] = static_cast<std::uint8_t>(scale);
      float error = 0;
      if (scale == kNanScale) {
        std::memset(codes, 0, static_cast<std::size_t>(block));
      } else if (scale >= kLeastPlainScale) {
        error = encode(run, block, b, from, codes, PlainUnits<Code>(scale));
      } else {
        error = encode(run, block, b, from, codes, TinyUnits<Code>(scale));
      }
      if constexpr (kTallies) run.tally->add<Code>(largest, scale, error, kStochastic);
    }
  }

  // Bits of floats without their signs have the floats' order, and those of NaN come last. The
  // compiler makes vectors of a maximum of integers, not of floats.
  [[gnu::always_inline]] static std::uint32_t largest_of(const Src* __restrict from, int block) {
    using Bits = std::conditional_t<sizeof(Src) == 4, std::int32_t, std::int16_t>;
    constexpr Bits kMagnitudeBits = std::numeric_limits<Bits>::max();
    Bits largest = 0;
    for (int group = 0; group < block; group += kGroup) {
      for (int i = 0; i < kGroup; ++i) {
        Bits bits;
        std::memcpy(&bits, from + group + i, sizeof bits);
        bits = static_cast<Bits>(bits & kMagnitudeBits);
        largest = bits > largest ? bits : largest;
      }
    }
    Src element;
    std::memcpy(&element, &largest, sizeof element);
    return float_bits(load(element));
  }

  template <class Units>
  [[gnu::always_inline]] static float encode(const EncodeRun& run, int block, std::int64_t b,
                                             const Src* __restrict from,
                                             std::uint8_t* __restrict codes, const Units& units) {
    std::int32_t error = 0;
    for (int group = 0; group < block; group += kGroup) {
      std::uint32_t random[kGroup];
      if constexpr (kStochastic) {
        const auto quad = static_cast<std::uint64_t>(run.first + b * block + group) / 4;
        for (unsigned i = 0; i < kGroup / 4; ++i) {
          const PhiloxWords words = philox(run.seed, quad + i);
          for (unsigned k = 0; k < 4; ++k) random[4 * i + k] = words.at[k];
        }
      }
      std::uint32_t wide[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        const RoundedElement rounded = Code::template round<kStochastic>(
            units(load(from[group + i])), kStochastic ? random[i] : 0);
        wide[i] = rounded.code;
        if constexpr (kTallies) {
          const auto bits = static_cast<std::int32_t>(float_bits(rounded.error) & kMagnitude);
          error = bits > error ? bits : error;
        }
      }
      // Apart, so that all before it is a loop over wide elements.
      for (int i = 0; i < kGroup; ++i) codes[group + i] = static_cast<std::uint8_t>(wide[i]);
    }
    return float_of_bits(static_cast<std::uint32_t>(error));
  }
};

// From codes of MxFp8 straight to the bits of bfloat16, in which its elements are exact, for scales
// at which all but zero are normal numbers. A vector holds twice as many of these as of floats.
class NarrowValues {
 public:
  [[gnu::always_inline]] static bool has(std::uint32_t scale) {
    return scale >= kLeastPlainScale && scale <= kLargestScale - MxFp8::kMostExponent;
  }
  [[gnu::always_inline]] explicit NarrowValues(std::uint32_t scale)
      : origin_(static_cast<std::int16_t>((scale - kBias) << 7)) {}
  [[gnu::always_inline]] std::uint16_t operator()(std::uint8_t code) const {
    const int magnitude = code & 0x7f;
    // Between two powers of two, the bits of a number are a linear function of its value. Codes
    // from 8 on are such bits themselves, so that one line holds for all powers. Below, each power
    // has its line, twice as steep as the next one's, and the least of all lines is the right one.
    const auto from_8 = static_cast<std::int16_t>(magnitude * 16);
    const auto from_4 = static_cast<std::int16_t>(magnitude * 32 - 128);
    const auto from_2 = static_cast<std::int16_t>(magnitude * 64 - 256);
    const auto from_1 = static_cast<std::int16_t>(magnitude * 128 - 384);
    const std::int16_t upper = from_8 < from_4 ? from_8 : from_4;
    const std::int16_t lower = from_2 < from_1 ? from_2 : from_1;
    const auto nonzero = static_cast<std::int16_t>((upper < lower ? upper : lower) + origin_);
    const auto finite = static_cast<std::int16_t>(magnitude == 0 ? 0 : nonzero);
    const auto bits = static_cast<std::int16_t>(magnitude == 0x7f ? kQuietNan >> 16 : finite);
    return static_cast<std::uint16_t>(bits | (code & 0x80) << 8);
  }

 private:
  static constexpr std::uint32_t kBias = 7;  // of E4M3's exponents

  std::int16_t origin_;
};

template <class Code, class Dst>
struct Decode {
  [[gnu::always_inline]] static void run(DecodeRun run) {
    auto* to = static_cast<Dst*>(run.dst);
    for (std::int64_t b = 0; b < run.blocks; ++b, to += run.block) {
      for (int part = 0; part < run.parts; ++part) {
        const std::int64_t at = part * run.stride;
        const std::uint8_t* codes = run.codes + at + b * run.block;
        if constexpr (std::is_same_v<Dst, float>) {
          if (run.adds || part > 0) {
            decode_block<true>(codes, run.scales[at + b], run.block, to);
            continue;
          }
        }
        decode_block<false>(codes, run.scales[at + b], run.block, to);
      }
      if constexpr (std::is_same_v<Dst, float>) {
        if (run.scale != 1.0f) {
          for (int i = 0; i < run.block; ++i) to[i] *= run.scale;
        }
      }
    }
  }

 private:
  template <bool kAdds>
  [[gnu::always_inline]] static void decode_block(const std::uint8_t* codes, std::uint32_t scale,
                                                  int block, Dst* to) {
    if (std::is_same_v<Code, MxFp8> && NarrowValues::has(scale)) {
      decode<kAdds>(codes, block, to, NarrowValues(scale));
    } else if (scale >= kLeastPlainScale) {
      decode<kAdds>(codes, block, to, PlainValues<Code>(scale));
    } else {
      decode<kAdds>(codes, block, to, TinyValues<Code>(scale));
    }
  }

  template <bool kAdds>
  [[gnu::always_inline]] static void decode(const std::uint8_t* __restrict codes, int block,
                                            Dst* __restrict to, const NarrowValues& values) {
    for (int group = 0; group < block; group += kGroup) {
      std::uint16_t narrow[kGroup];
      for (int i = 0; i < kGroup; ++i) narrow[i] = values(codes[group + i]);
      for (int i = 0; i < kGroup; ++i) {
        if constexpr (std::is_same_v<Dst, BFloat16>) {
          to[group + i].bits = narrow[i];
        } else {
          put<kAdds>(to[group + i], load(BFloat16{narrow[i]}));
        }
      }
    }
  }

  template <bool kAdds, class Values>
  [[gnu::always_inline]] static void decode(const std::uint8_t* __restrict codes, int block,
                                            Dst* __restrict to, const Values& values) {
    for (int group = 0; group < block; group += kGroup) {
      for (int i = 0; i < kGroup; ++i) {
        const float value = values(Code::value(codes[group + i]));
        if constexpr (std::is_same_v<Dst, BFloat16> && Values::kFewBits) {
          to[group + i].bits = static_cast<std::uint16_t>(float_bits(value) >> 16);
        } else {
          put<kAdds>(to[group + i], value);
        }
      }
    }
  }

  template <bool kAdds>
  [[gnu::always_inline]] static void put(Dst& to, float value) {
    if constexpr (kAdds) {
      to += value;
    } else {
      store(to, value);
    }
  }
};

template <class Dst, bool kAccumulate, class Side>
struct FinishSum {
  [[gnu::always_inline]] static void run(void* dst, const float* sums, std::int64_t count,
                                         float scale, std::int32_t* nonfinite) {
    auto* __restrict to = static_cast<Dst*>(dst);
    const float* __restrict from = sums;
    Side side;
    for (std::int64_t i = 0; i < count; ++i) {
      finish(to[i], from[i], kAccumulate, 1, 1.0f, scale);
      side.wrote(to[i]);
    }
    report(side, nonfinite);
  }
};

template <class Visit>
void with_code(BlockCode code, Visit visit) {
  return code == BlockCode::mxint8 ? visit(MxInt8{}) : visit(MxFp8{});
}

template <class Visit>
void with_float(DType dtype, Visit visit) {
  if (dtype == DType::f16) return visit(Half{});
  if (dtype == DType::bf16) return visit(BFloat16{});
  return visit(float{});
}

#if defined(__x86_64__)
// The loop by hand stops before a block that needs care. The portable one does that block, and the
// loop by hand goes on behind it.
template <class Element, class Loop, class Run, std::int64_t (*kByHand)(const Run&)>
void by_hand(Run run) {
  while (true) {
    run = run.template after<Element>(kByHand(run));
    if (run.blocks == 0) return;
    Run next = run;
    next.blocks = 1;
    Versions<Loop>::avx2(next);
    run = run.template after<Element>(1);
  }
}
#endif

template <class Code, class Src, bool kStochastic, bool kTallies>
EncodeKernel encode_kernel() {
  using Loop = Encode<Code, Src, kStochastic, kTallies>;
#if defined(__x86_64__)
  if constexpr (!kStochastic && !std::is_same_v<Src, Half>) {
    if (instruction_set() != InstructionSet::baseline) {
      return by_hand<Src, Loop, EncodeRun, avx2::encode<Code, Src, kTallies>>;
    }
  }
#endif
  return best_of<Loop, 256>();
}

template <class Code, class Dst>
DecodeKernel decode_kernel() {
  using Loop = Decode<Code, Dst>;
#if defined(__x86_64__)
  if constexpr (!std::is_same_v<Dst, Half>) {
    if (instruction_set() != InstructionSet::baseline) {
      return by_hand<Dst, Loop, DecodeRun, avx2::decode<Code, Dst>>;
    }
  }
#endif
  return best_of<Loop, 256>();
}

}  // namespace

EncodeKernel encode_kernel(const BlockFormat& format, DType dtype, bool tallies) {
  const bool stochastic = format.rounding == Rounding::stochastic;
  EncodeKernel kernel = nullptr;
  with_code(format.code, [&](auto code) {
    with_float(dtype, [&](auto src) {
      using Code = decltype(code);
      using Src = decltype(src);
      kernel = stochastic ? tallies ? encode_kernel<Code, Src, true, true>()
                                    : encode_kernel<Code, Src, true, false>()
               : tallies  ? encode_kernel<Code, Src, false, true>()
                          : encode_kernel<Code, Src, false, false>();
    });
  });
  return kernel;
}

DecodeKernel decode_kernel(const BlockFormat& format, DType dtype) {
  DecodeKernel kernel = nullptr;
  with_code(format.code, [&](auto code) {
    with_float(dtype, [&](auto dst) { kernel = decode_kernel<decltype(code), decltype(dst)>(); });
  });
  return kernel;
}

FinishKernel finish_kernel(const Epilogue& epilogue) {
  FinishKernel kernel = nullptr;
  with_float(epilogue.dtype, [&](auto dst) {
    using Dst = decltype(dst);
    kernel = epilogue.accumulate ? best_of<FinishSum<Dst, true, Watch<Dst>>>()
                                 : best_of<FinishSum<Dst, false, Watch<Dst>>>();
  });
  return kernel;
}

}  // namespace shardcomm
