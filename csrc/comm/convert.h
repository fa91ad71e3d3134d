// Contiguous copies with conversion, as a gather makes them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "shardcomm/copy_plan.h"
#include "shardcomm/dtype.h"

namespace shardcomm {

inline void check_conversion(const char* operation, DType from, DType to) {
  if (from == to || (is_convertible(from) && is_convertible(to))) return;
  throw std::invalid_argument(std::string(operation) + ": no conversion from " + name(from) +
                              " to " + name(to) +
                              "; f32, bf16 and f16 convert, other dtypes go to themselves");
}

inline void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype,
                    std::int64_t count) {
  if (dst == src && dst_dtype == src_dtype) return;
  const CopyPlan plan({{0, 0, 0, count, 0, count, 1, count}}, src_dtype, dst_dtype);
  copy_cpu(plan, &src, &dst, {});
}

}  // namespace shardcomm
