// The element types that the core knows by name. Others travel as raw bytes (u8).
#pragma once

#include <cstddef>
#include <cstdint>

namespace shardcomm {

enum class DType : std::uint8_t { u8, i32, i64, f16, bf16, f32, f64, i8 };

constexpr std::size_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::u8:
    case DType::i8:
      return 1;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i32:
    case DType::f32:
      return 4;
    case DType::i64:
    case DType::f64:
      return 8;
  }
  return 0;
}

// Whether elements of this type convert to the other types for which this is true. A copy can scale
// and accumulate these types alone.
constexpr bool is_convertible(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32;
}

constexpr bool is_floating(DType dtype) { return is_convertible(dtype) || dtype == DType::f64; }

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return "u8";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::i8:
      return "i8";
  }
  return "?";
}

}  // namespace shardcomm
