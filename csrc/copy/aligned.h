// Memory of elements, which kernels read and write at multiples of an element's size.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "shardcomm/dtype.h"

namespace shardcomm {

inline bool is_aligned(const void* data, DType dtype) {
  return reinterpret_cast<std::uintptr_t>(data) % itemsize(dtype) == 0;
}

[[noreturn]] inline void refuse_misaligned(const std::string& what, DType dtype) {
  throw std::invalid_argument(what + " begins at an address that is no multiple of " +
                              std::to_string(itemsize(dtype)) + ", the size of an element of " +
                              name(dtype) + "; copy it to memory that is aligned");
}

}  // namespace shardcomm
