// Buffers of elements, as collectives address and check them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "copy/aligned.h"
#include "shardcomm/dtype.h"
#include "shardcomm/parts.h"
#include "shardcomm/reduce.h"

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

inline void check_count(const char* operation, std::int64_t count) {
  if (count >= 0) return;
  throw std::invalid_argument(std::string(operation) + ": count is " + std::to_string(count) +
                              "; it must be at least 0");
}

inline void check_buffer(const char* operation, const char* name, const void* data,
                         std::int64_t count, DType dtype) {
  check_count(operation, count);
  if (count > Parts::kMost) {
    throw std::invalid_argument(std::string(operation) + ": count is " + std::to_string(count) +
                                "; it must be at most 2^60");
  }
  if (count > 0 && data == nullptr) {
    throw std::invalid_argument(std::string(operation) + ": " + name + " is null");
  }
  if (count > 0 && !is_aligned(data, dtype)) {
    refuse_misaligned(std::string(operation) + ": " + name, dtype);
  }
}

inline void check_conversion(const char* operation, DType from, DType to) {
  if (from == to || (is_convertible(from) && is_convertible(to))) return;
  throw std::invalid_argument(std::string(operation) + ": no conversion from " + name(from) +
                              " to " + name(to) +
                              "; f32, bf16 and f16 convert, other dtypes go to themselves");
}

inline bool overlap(const void* one, std::size_t one_bytes, const void* other,
                    std::size_t other_bytes) {
  if (one_bytes == 0 || other_bytes == 0) return false;
  const auto a = reinterpret_cast<std::uintptr_t>(one);
  const auto b = reinterpret_cast<std::uintptr_t>(other);
  return a <= b ? b - a < one_bytes : a - b < other_bytes;
}

inline void check_parts(const char* operation, const Parts& parts, int size) {
  if (!parts.are_for(size)) {
    throw std::invalid_argument(std::string(operation) +
                                ": counts must have one entry for each of " + std::to_string(size) +
                                " ranks");
  }
  check_count(operation, parts.longest());  // before any sum of counts, which may overflow
  if (parts.equal() && parts.longest() > Parts::kMost / size) {
    throw std::invalid_argument(std::string(operation) + ": count is " +
                                std::to_string(parts.longest()) + "; the " + std::to_string(size) +
                                " ranks together must have at most 2^60 elements");
  }
}

// "recv[6 : 9]"
inline std::string part_of(const char* name, const Parts& parts, int rank) {
  return std::string(name) + "[" + std::to_string(parts.begin(rank)) + " : " +
         std::to_string(parts.begin(rank) + parts.count(rank)) + "]";
}

// A collective in place writes a rank's part exactly where that part is read. With any other
// overlap it would overwrite memory that is read later.
inline void check_all_gather(const void* send, DType send_dtype, const void* recv, DType recv_dtype,
                             const Parts& parts, int rank, int size) {
  check_parts("all_gather", parts, size);
  const std::int64_t own = parts.count(rank);
  const std::int64_t all = parts.total(size);
  check_buffer("all_gather", "send", send, own, send_dtype);
  check_buffer("all_gather", "recv", recv, all, recv_dtype);
  check_conversion("all_gather", send_dtype, recv_dtype);
  if (!overlap(send, bytes_of(own, send_dtype), recv, bytes_of(all, recv_dtype))) return;
  if (send_dtype == recv_dtype && send == at(recv, parts.begin(rank), recv_dtype)) return;
  throw std::invalid_argument(
      "all_gather: send overlaps recv; it must lie apart from it or, in place, be this rank's part "
      "of it, here " +
      part_of("recv", parts, rank) + ", of recv's dtype");
}
// What a collective may be called with. Whether sums are exact is said once, of a communicator.
inline void check_called(RedOp op, DType dtype) {
  if (is_exact(op)) {
    throw std::invalid_argument(std::string("op is ") + name(op) +
                                "; give sum or avg, to a communicator with exact_sums");
  }
  check_operation(op, dtype);
}
inline void check_reduce_scatter(const void* send, DType dtype, const void* recv,
                                 const Epilogue& epilogue, const Parts& parts, RedOp op, int rank,
                                 int size) {
  check_parts("reduce_scatter", parts, size);
  const std::int64_t own = parts.count(rank);
  const std::int64_t all = parts.total(size);
  check_buffer("reduce_scatter", "send", send, all, dtype);
  check_buffer("reduce_scatter", "recv", recv, own, epilogue.dtype);
  check_called(op, dtype);
  check_conversion("reduce_scatter", dtype, epilogue.dtype);
  check_epilogue(epilogue, dtype);
  if (!overlap(send, bytes_of(all, dtype), recv, bytes_of(own, epilogue.dtype))) return;
  if (dtype == epilogue.dtype && recv == at(send, parts.begin(rank), dtype)) return;
  throw std::invalid_argument(
      "reduce_scatter: recv overlaps send, of which other ranks read; it must lie apart from it "
      "or, in place, be this rank's part of it, here " +
      part_of("send", parts, rank) + ", of send's dtype");
}

}  // namespace shardcomm
