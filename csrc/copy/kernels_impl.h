// Included once by each kernels_<isa>.cpp, which defines SHARDCOMM_KERNELS as the name of its table. Everything is in an
// unnamed namespace and nothing of the standard library is instantiated here: an inline function compiled for AVX-512
// must not become the copy that the linker keeps for everybody.
#include <cstdint>
#include <cstring>

#include "copy/kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace shardcomm {
namespace {

struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return float_of(static_cast<std::uint32_t>(x.bits) << 16); }
inline float widen(f16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  const std::uint32_t wide = exponent == 31 ? 0xffu : exponent + 112;
  return float_of(sign | (wide << 23) | (mantissa << 13));
}

inline void narrow(float x, float& out) { out = x; }

// Round to nearest even by adding half of what is cut off, plus the lowest kept bit; NaN stays a (quiet) NaN.
inline void narrow(float x, bf16& out) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = static_cast<std::uint16_t>(is_nan ? quiet : rounded);
}

inline void narrow(float x, f16& out) {
  const std::uint32_t all = bits_of(x);
  const std::uint32_t sign = (all >> 16) & 0x8000u;
  const std::uint32_t bits = all & 0x7fffffffu;
  std::uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u | ((bits >> 13) & 0x3ffu);
  } else if (bits >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {
    // Subnormal: next to 0.5 a float's last bit is worth 2^-24, f16's smallest step, so the addition rounds.
    half = bits_of(float_of(bits) + 0.5f) - 0x3f000000u;
  } else {
    half = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
  }
  out.bits = static_cast<std::uint16_t>(sign | half);
}

template <typename T>
void load(float* __restrict to, const T* __restrict from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

template <typename T>
void store(T* __restrict to, const float* __restrict from, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}

#if defined(__F16C__)
template <>
void load(float* __restrict to, const f16* __restrict from, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
  }
  for (; i < count; ++i) to[i] = widen(from[i]);
}

template <>
void store(f16* __restrict to, const float* __restrict from, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 wide = _mm256_loadu_ps(from + i);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < count; ++i) narrow(from[i], to[i]);
}
#endif

// Elements are widened into a block that stays in the first-level cache, worked on there, and narrowed once.
constexpr std::int64_t kBlock = 1024;

template <typename T>
void finish(T* dst, float* block, std::int64_t count, float scale, bool accumulate) {
  if (scale != 1.0f) {
    for (std::int64_t i = 0; i < count; ++i) block[i] *= scale;
  }
  if (accumulate) {
    float held[kBlock];
    load(held, dst, count);
    for (std::int64_t i = 0; i < count; ++i) block[i] = held[i] + block[i];
  }
  store(dst, block, count);
}

template <typename D, typename S>
void convert_run(D* dst, const S* src, std::int64_t count, float scale, bool accumulate) {
  float block[kBlock];
  for (std::int64_t done = 0; done < count; done += kBlock) {
    const std::int64_t n = count - done < kBlock ? count - done : kBlock;
    load(block, src + done, n);
    finish(dst + done, block, n, scale, accumulate);
  }
}

template <typename S>
void convert_from(void* dst, DType dst_dtype, const S* src, std::int64_t count, float scale,
                  bool accumulate) {
  switch (dst_dtype) {
    case DType::bf16:
      return convert_run(static_cast<bf16*>(dst), src, count, scale, accumulate);
    case DType::f16:
      return convert_run(static_cast<f16*>(dst), src, count, scale, accumulate);
    default:
      return convert_run(static_cast<float*>(dst), src, count, scale, accumulate);
  }
}

void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
             float scale, bool accumulate) {
  switch (src_dtype) {
    case DType::bf16:
      return convert_from(dst, dst_dtype, static_cast<const bf16*>(src), count, scale, accumulate);
    case DType::f16:
      return convert_from(dst, dst_dtype, static_cast<const f16*>(src), count, scale, accumulate);
    default:
      return convert_from(dst, dst_dtype, static_cast<const float*>(src), count, scale, accumulate);
  }
}

void stream(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
#if defined(__AVX2__)
  constexpr std::size_t kLine = sizeof(__m256i);
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (bytes >= head + kLine) {
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
      const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), line);
    }
    _mm_sfence();  // before a flag tells others that the data is there
  }
#endif
  std::memcpy(to, from, bytes);
}

template <typename A>
inline A combine(RedOp op, A a, A b) {
  // Comparisons with NaN are false: written so that a NaN on either side comes through.
  if (op == RedOp::max) return a != a || a > b ? a : b;
  if (op == RedOp::min) return a != a || a < b ? a : b;
  return a + b;
}

template <typename A>
void combine_run(RedOp op, A* __restrict into, const A* __restrict other, std::int64_t count) {
  // The operation is the same for all elements: one loop each, so that each vectorises.
  if (op == RedOp::max) {
    for (std::int64_t i = 0; i < count; ++i) into[i] = combine(RedOp::max, into[i], other[i]);
  } else if (op == RedOp::min) {
    for (std::int64_t i = 0; i < count; ++i) into[i] = combine(RedOp::min, into[i], other[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) into[i] += other[i];
  }
}

// f32, bf16, f16: summed in float, finished once.
template <typename S, typename D>
void reduce_floats(D* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                   RedOp op, std::int64_t count) {
  const float scale =
      op == RedOp::avg ? epilogue.scale / static_cast<float>(num_sources) : epilogue.scale;
  float block[kBlock];
  float next[kBlock];
  for (std::int64_t done = 0; done < count; done += kBlock) {
    const std::int64_t n = count - done < kBlock ? count - done : kBlock;
    load(block, static_cast<const S*>(sources[0]) + done, n);
    for (int s = 1; s < num_sources; ++s) {
      load(next, static_cast<const S*>(sources[s]) + done, n);
      combine_run(op, block, next, n);
    }
    finish(dst + done, block, n, scale, epilogue.accumulate);
  }
}

template <typename S>
void reduce_to(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
               RedOp op, std::int64_t count) {
  switch (epilogue.dtype) {
    case DType::bf16:
      return reduce_floats<S>(static_cast<bf16*>(dst), epilogue, sources, num_sources, op, count);
    case DType::f16:
      return reduce_floats<S>(static_cast<f16*>(dst), epilogue, sources, num_sources, op, count);
    default:
      return reduce_floats<S>(static_cast<float*>(dst), epilogue, sources, num_sources, op, count);
  }
}

// f64 and integers: reduced in themselves, no epilogue but the average and accumulation.
template <typename T>
void reduce_exact(T* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                  RedOp op, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    T total = static_cast<const T*>(sources[0])[i];
    for (int s = 1; s < num_sources; ++s) {
      total = static_cast<T>(combine(op, total, static_cast<const T*>(sources[s])[i]));
    }
    if (op == RedOp::avg) total = static_cast<T>(total / static_cast<T>(num_sources));
    dst[i] = epilogue.accumulate ? static_cast<T>(dst[i] + total) : total;
  }
}

void reduce(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
            DType dtype, RedOp op, std::int64_t count) {
  switch (dtype) {
    case DType::f32:
      return reduce_to<float>(dst, epilogue, sources, num_sources, op, count);
    case DType::bf16:
      return reduce_to<bf16>(dst, epilogue, sources, num_sources, op, count);
    case DType::f16:
      return reduce_to<f16>(dst, epilogue, sources, num_sources, op, count);
    case DType::f64:
      return reduce_exact(static_cast<double*>(dst), epilogue, sources, num_sources, op, count);
    case DType::i64:
      return reduce_exact(static_cast<std::int64_t*>(dst), epilogue, sources, num_sources, op,
                          count);
    case DType::i32:
      return reduce_exact(static_cast<std::int32_t*>(dst), epilogue, sources, num_sources, op,
                          count);
    case DType::u8:
      return reduce_exact(static_cast<std::uint8_t*>(dst), epilogue, sources, num_sources, op,
                          count);
  }
}

}  // namespace

extern const Kernels SHARDCOMM_KERNELS;
const Kernels SHARDCOMM_KERNELS = {stream, convert, reduce};

}  // namespace shardcomm
