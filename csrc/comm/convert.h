// Contiguous copies with conversion, as a gather makes them.
#pragma once

#include <cstdint>
#include <cstring>

#include <stdexcept>
#include <string>

#include "copy/kernels.h"
#include "shardcomm/dtype.h"

namespace shardcomm {

inline void check_conversion(const char* operation, DType from, DType to) {
  const auto floats = [](DType dtype) {
    return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
  };
  if (from == to || (floats(from) && floats(to))) return;
  throw std::invalid_argument(std::string(operation) + ": no conversion from " + name(from) +
                              " to " + name(to) +
                              "; f32, bf16 and f16 convert, other dtypes go to themselves");
}

// From here on not reading the destination before it is overwritten saves more than finding it in a cache would.
inline constexpr std::size_t kStreamBytes = 2 * 1024 * 1024;

inline void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype,
                    std::int64_t count) {
  if (dst_dtype != src_dtype) {
    kernels().convert(dst, dst_dtype, src, src_dtype, count, 1.0f, false);
  } else if (dst != src) {
    const std::size_t bytes = static_cast<std::size_t>(count) * itemsize(dst_dtype);
    if (bytes >= kStreamBytes) {
      kernels().stream(dst, src, bytes);
    } else {
      std::memcpy(dst, src, bytes);
    }
  }
}

}  // namespace shardcomm
