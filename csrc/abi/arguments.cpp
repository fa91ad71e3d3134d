#include "abi/arguments.h"

namespace shardcomm::abi {
namespace {

std::string dotted(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

DType dtype_of(shc_dtype dtype, const char* argument) {
  switch (dtype) {
    case SHC_U8:
      return DType::u8;
    case SHC_I32:
      return DType::i32;
    case SHC_I64:
      return DType::i64;
    case SHC_F16:
      return DType::f16;
    case SHC_BF16:
      return DType::bf16;
    case SHC_F32:
      return DType::f32;
    case SHC_F64:
      return DType::f64;
    case SHC_I8:
      return DType::i8;
  }
  throw std::invalid_argument(std::string(argument) + " is " +
                              std::to_string(static_cast<int>(dtype)) +
                              "; it must be an shc_dtype, SHC_U8 (0) to SHC_I8 (7)");
}

RedOp op_of(shc_op op) {
  switch (op) {
    case SHC_SUM:
      return RedOp::sum;
    case SHC_AVG:
      return RedOp::avg;
    case SHC_MAX:
      return RedOp::max;
    case SHC_MIN:
      return RedOp::min;
    case SHC_PROD:
      return RedOp::prod;
    case SHC_BAND:
      return RedOp::band;
    case SHC_BOR:
      return RedOp::bor;
    case SHC_BXOR:
      return RedOp::bxor;
  }
  throw std::invalid_argument("op is " + std::to_string(static_cast<int>(op)) +
                              "; it must be an shc_op, SHC_SUM (0) to SHC_BXOR (7)");
}

BlockFormat format_of(const shc_block_format* format, const char* argument) {
  const shc_block_format& given = required(format, argument);
  if (given.code != SHC_MXINT8 && given.code != SHC_MXFP8) {
    throw std::invalid_argument(std::string(argument) + ".code is " +
                                std::to_string(static_cast<int>(given.code)) +
                                "; it must be SHC_MXINT8 (0) or SHC_MXFP8 (1)");
  }
  if (given.rounding != SHC_NEAREST && given.rounding != SHC_STOCHASTIC) {
    throw std::invalid_argument(std::string(argument) + ".rounding is " +
                                std::to_string(static_cast<int>(given.rounding)) +
                                "; it must be SHC_NEAREST (0) or SHC_STOCHASTIC (1)");
  }
  return {given.code == SHC_MXINT8 ? BlockCode::mxint8 : BlockCode::mxfp8, given.block,
          given.rounding == SHC_NEAREST ? Rounding::nearest : Rounding::stochastic};
}

void check_header(const char* argument, std::size_t size, int version, std::size_t oldest) {
  if (version / 10000 != SHC_VERSION / 10000 || version <= 0) {
    throw std::invalid_argument(
        std::string(argument) + "->version is " + std::to_string(version) + " (" + dotted(version) +
        "), and this library is " + dotted(SHC_VERSION) +
        "; begin the struct with its INIT macro, and compile with a header of the same major "
        "version");
  }
  constexpr std::size_t kMost = 1 << 16;  // of any later version
  if (size < oldest || size > kMost) {
    throw std::invalid_argument(std::string(argument) + "->size is " + std::to_string(size) +
                                "; it must be at least " + std::to_string(oldest) +
                                " and at most " + std::to_string(kMost) +
                                ": begin the struct with its INIT macro");
  }
}

void check_rest(const char* argument, const void* given, std::size_t size, std::size_t known) {
  const auto* bytes = static_cast<const char*>(given);
  for (std::size_t i = known; i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw std::invalid_argument(std::string(argument) +
                                " sets an option that this library does not have: it is " +
                                dotted(SHC_VERSION) + ", and the program's header is newer");
  }
}

}  // namespace shardcomm::abi

size_t shc_dtype_size(shc_dtype dtype) {
  if (dtype < SHC_U8 || dtype > SHC_I8) return 0;
  return shardcomm::itemsize(shardcomm::abi::dtype_of(dtype, "dtype"));
}

const char* shc_dtype_name(shc_dtype dtype) {
  if (dtype < SHC_U8 || dtype > SHC_I8) return nullptr;
  return shardcomm::name(shardcomm::abi::dtype_of(dtype, "dtype"));
}
