// Torch's element types and reductions, as the C library calls them.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shardcomm.h"

namespace shardcomm_torch {

// The type with which the C library computes.
inline std::optional<shc_dtype> computed(at::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kBool:
      return SHC_U8;
    case at::kChar:
      return SHC_I8;
    case at::kInt:
      return SHC_I32;
    case at::kLong:
      return SHC_I64;
    case at::kHalf:
      return SHC_F16;
    case at::kBFloat16:
      return SHC_BF16;
    case at::kFloat:
      return SHC_F32;
    case at::kDouble:
      return SHC_F64;
    default:
      return std::nullopt;
  }
}

// Elements that are only moved: of a known type, or so many bytes each.
struct Moved {
  explicit Moved(at::ScalarType type)
      : dtype(computed(type).value_or(SHC_U8)),
        width(computed(type) ? 1 : static_cast<std::int64_t>(c10::elementSize(type))) {}

  shc_dtype dtype;
  std::int64_t width;  // elements of `dtype` for each of the tensor's
};

// Elements that are reduced, and how.
struct Reduced {
  Reduced(const char* operation, const c10d::ReduceOp& reduce_op, at::ScalarType type)
      : dtype(computable(operation, type)),
        width(c10::isComplexType(type) ? 2 : 1),
        op(reduction(operation, reduce_op, type)) {}

  shc_dtype dtype;
  std::int64_t width;  // elements of `dtype` for each of the tensor's
  shc_op op;

 private:
  static shc_dtype computable(const char* operation, at::ScalarType type) {
    if (const auto dtype = computed(c10::toRealValueType(type))) return *dtype;
    C10_THROW_ERROR(
        TypeError, c10::str(operation, ": dtype is ", type,
                            ", which the backend 'shardcomm' does not compute with; accepted: "
                            "uint8, int8, int32, int64, bool, float16, bfloat16, float32, float64, "
                            "complex32, complex64, complex128"));
  }

  static shc_op reduction(const char* operation, const c10d::ReduceOp& op, at::ScalarType type) {
    const bool sums = op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG;
    if (c10::isComplexType(type) && !sums) {
      C10_THROW_ERROR(ValueError,
                      c10::str(operation, ": dtype is ", type,
                               "; accepted for complex numbers are the ops SUM and AVG"));
    }
    if (op == c10d::ReduceOp::AVG && type == at::kBool) {
      C10_THROW_ERROR(ValueError, c10::str(operation,
                                           ": op is AVG and dtype is bool, which have no "
                                           "average; take MIN, MAX or a sum of integers"));
    }
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        return type == at::kBool ? SHC_BOR : SHC_SUM;  // the byte of True is 1
      case c10d::ReduceOp::AVG:
        return SHC_AVG;
      case c10d::ReduceOp::PRODUCT:
        return SHC_PROD;
      case c10d::ReduceOp::MIN:
        return SHC_MIN;
      case c10d::ReduceOp::MAX:
        return SHC_MAX;
      case c10d::ReduceOp::BAND:
        return SHC_BAND;
      case c10d::ReduceOp::BOR:
        return SHC_BOR;
      case c10d::ReduceOp::BXOR:
        return SHC_BXOR;
      default:
        C10_THROW_ERROR(ValueError,
                        c10::str(operation,
                                 ": op is none of those accepted: SUM, AVG, PRODUCT, MIN, MAX, "
                                 "BAND, BOR, BXOR and PREMUL_SUM"));
    }
  }
};

}  // namespace shardcomm_torch
