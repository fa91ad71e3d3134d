// Reductions as NCCL's kernels do them: element by element, in the order of the ranks on the ring,
// rounded to the type at each hop.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace fake_nccl {

enum Op : int { op_sum = 0, op_prod = 1, op_max = 2, op_min = 3, op_avg = 4 };

inline bool known_dtype(int dtype) { return dtype >= 0 && dtype <= 9; }
inline bool is_float(int dtype) { return dtype >= 6; }
inline std::size_t item_bytes(int dtype) {
  constexpr std::size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kBytes[dtype];
}

// What elements are added in: themselves, but for the two-byte floats.
inline float widen(__half x) { return __half2float(x); }
inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
T widen(T x) {
  return x;
}
template <class T, class Wide>
T narrow(Wide x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return static_cast<T>(x);
  }
}

template <class Wide>
Wide combine(Wide a, Wide b, int op) {
  if (op == op_max) return std::max(a, b);
  if (op == op_min) return std::min(a, b);
  if constexpr (std::is_integral_v<Wide>) {
    using Bits = std::make_unsigned_t<Wide>;  // overflow wraps
    const auto x = static_cast<Bits>(a);
    const auto y = static_cast<Bits>(b);
    return static_cast<Wide>(static_cast<Bits>(op == op_prod ? x * y : x + y));
  } else {
    return op == op_prod ? a * b : a + b;
  }
}

template <class T>
T read(const char* from, std::size_t i) {
  T x;
  std::memcpy(&x, from + i * sizeof(T), sizeof(T));
  return x;
}

// `wide`: rounded once, at the end (symmetric kernels, ncclSymkAccumType). The average of floats is
// PreMulSum: each rank's elements are multiplied by 1/n in their own type; that of integers is
// SumPostDiv (enqueue.cc, hostToDevRedOp).
template <class T>
void reduce_as(const std::vector<const char*>& sources, char* to, std::size_t count, int op,
               bool wide) {
  using Wide = decltype(widen(T()));
  const auto ranks = static_cast<Wide>(sources.size());
  const Wide share = widen(narrow<T>(Wide(1) / ranks));
  const bool scaled = op == op_avg && !std::is_integral_v<T>;
  for (std::size_t i = 0; i < count; ++i) {
    Wide sum{};
    for (std::size_t rank = 0; rank < sources.size(); ++rank) {
      Wide x = widen(read<T>(sources[rank], i));
      if (scaled) x = widen(narrow<T>(x * share));
      sum = rank == 0 ? x : combine(sum, x, op);
      if (!wide) sum = widen(narrow<T>(sum));
    }
    if (op == op_avg && std::is_integral_v<T>) sum = sum / ranks;
    const T result = narrow<T>(sum);
    std::memcpy(to + i * sizeof(T), &result, sizeof(T));
  }
}

inline void reduce(int dtype, const std::vector<const char*>& sources, char* to, std::size_t count,
                   int op, bool wide) {
  switch (dtype) {
    case 0:
      return reduce_as<std::int8_t>(sources, to, count, op, wide);
    case 1:
      return reduce_as<std::uint8_t>(sources, to, count, op, wide);
    case 2:
      return reduce_as<std::int32_t>(sources, to, count, op, wide);
    case 3:
      return reduce_as<std::uint32_t>(sources, to, count, op, wide);
    case 4:
      return reduce_as<std::int64_t>(sources, to, count, op, wide);
    case 5:
      return reduce_as<std::uint64_t>(sources, to, count, op, wide);
    case 6:
      return reduce_as<__half>(sources, to, count, op, wide);
    case 7:
      return reduce_as<float>(sources, to, count, op, wide);
    case 8:
      return reduce_as<double>(sources, to, count, op, wide);
    default:
      return reduce_as<__nv_bfloat16>(sources, to, count, op, wide);
  }
}

}  // namespace fake_nccl
