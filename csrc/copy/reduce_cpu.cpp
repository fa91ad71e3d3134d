#include <stdexcept>
#include <string>

#include "copy/kernels.h"
#include "shardcomm/reduce.h"

namespace shardcomm {

void check_epilogue(const Epilogue& epilogue, DType dtype) {
  const bool floats = dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
  const bool to_floats = epilogue.dtype == DType::f32 || epilogue.dtype == DType::bf16 ||
                         epilogue.dtype == DType::f16;
  if (floats && to_floats) return;
  if (epilogue.dtype != dtype || epilogue.scale != 1.0f) {
    throw std::invalid_argument(std::string("reduce: ") + name(dtype) + " to " +
                                name(epilogue.dtype) +
                                "; only f32, bf16 and f16 convert and scale, other dtypes are "
                                "reduced into themselves");
  }
}

void reduce_cpu(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                DType dtype, RedOp op, std::int64_t count) {
  check_epilogue(epilogue, dtype);
  if (num_sources < 1) {
    throw std::invalid_argument("reduce: num_sources is " + std::to_string(num_sources) +
                                "; it must be at least 1");
  }
  kernels().reduce(dst, epilogue, sources, num_sources, dtype, op, count);
}

}  // namespace shardcomm
