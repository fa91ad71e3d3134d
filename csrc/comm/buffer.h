// Buffers of elements as the collectives address them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "shardcomm/dtype.h"

namespace shardcomm {

inline std::byte* at(void* data, std::int64_t index, DType dtype) {
  return static_cast<std::byte*>(data) + index * static_cast<std::int64_t>(itemsize(dtype));
}
inline const std::byte* at(const void* data, std::int64_t index, DType dtype) {
  return static_cast<const std::byte*>(data) + index * static_cast<std::int64_t>(itemsize(dtype));
}

inline std::size_t bytes_of(std::int64_t count, DType dtype) {
  return static_cast<std::size_t>(count) * itemsize(dtype);
}

inline void check_buffer(const char* operation, const char* name, const void* data,
                         std::int64_t count) {
  if (count < 0) {
    throw std::invalid_argument(std::string(operation) + ": count is " + std::to_string(count) +
                                "; it must be at least 0");
  }
  if (count > 0 && data == nullptr) {
    throw std::invalid_argument(std::string(operation) + ": " + name + " is null");
  }
}

inline void check_conversion(const char* operation, DType from, DType to) {
  if (from == to || (is_convertible(from) && is_convertible(to))) return;
  throw std::invalid_argument(std::string(operation) + ": no conversion from " + name(from) +
                              " to " + name(to) +
                              "; f32, bf16 and f16 convert, other dtypes go to themselves");
}

inline constexpr const char* kPrivate =
    "a buffer is private memory of its rank: copied through a staging area";

}  // namespace shardcomm
