// A run of elements, copied and converted on a CPU: what a CopyPlan of one segment does, without a
// plan.
#pragma once

#include <cstdint>

#include "shardcomm/dtype.h"

namespace shardcomm {

// dst[i] = convert(src[i]). Does nothing if `dst` and `src` are the same place. The dtypes convert
// (CopyPlan says which do).
void convert_cpu(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count);

}  // namespace shardcomm
