// What C programs give: pointers, numbers that should be enumerators, and structs of other
// versions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

#include "shardcomm.h"
#include "shardcomm/blocks.h"
#include "shardcomm/dtype.h"
#include "shardcomm/reduce.h"

namespace shardcomm::abi {

template <class T>
T& required(T* pointer, const char* argument) {
  if (pointer == nullptr) throw std::invalid_argument(std::string(argument) + " is NULL");
  return *pointer;
}

DType dtype_of(shc_dtype dtype, const char* argument);
RedOp op_of(shc_op op);
BlockFormat format_of(const shc_block_format* format, const char* argument);

// The size of a struct in 0.1.0, the first version of its header. No struct may end in padding,
// which a later field would take while older programs leave it as it is.
template <class Struct>
constexpr std::size_t kOldest = 0;
template <>
inline constexpr std::size_t kOldest<shc_error> = 56;
template <>
inline constexpr std::size_t kOldest<shc_copy_options> = 32;
template <>
inline constexpr std::size_t kOldest<shc_comm_options> = 24;
template <>
inline constexpr std::size_t kOldest<shc_across> = 64;
template <>
inline constexpr std::size_t kOldest<shc_receipt> = 344;
template <>
inline constexpr std::size_t kOldest<shc_gather_options> = 32;
template <>
inline constexpr std::size_t kOldest<shc_reduce_options> = 48;

// Refuses a struct whose first fields are not as an INIT macro of a header of this major version
// has set them.
void check_header(const char* argument, std::size_t size, int version, std::size_t oldest);

// Refuses a struct of a newer header that asks for something of which this library does not know.
void check_rest(const char* argument, const void* given, std::size_t size, std::size_t known);

// A program's options, whose header may be older or newer than this library. Fields that its header
// does not have keep their defaults. NULL stands for the defaults.
template <class Options>
Options options_of(const char* argument, const Options* given, Options defaults) {
  static_assert(kOldest<Options> > 0 && sizeof(Options) >= kOldest<Options>);
  if (given == nullptr) return defaults;
  check_header(argument, given->size, given->version, kOldest<Options>);
  check_rest(argument, given, given->size, sizeof(Options));
  std::memcpy(&defaults, given, std::min(given->size, sizeof(Options)));
  return defaults;
}

// Writes a program's struct, as far as its header goes.
template <class Result>
void fill(const char* argument, Result* given, Result result) {
  static_assert(kOldest<Result> > 0 && sizeof(Result) >= kOldest<Result>);
  Result& into = required(given, argument);
  check_header(argument, into.size, into.version, kOldest<Result>);
  result.size = into.size;
  result.version = into.version;
  std::memcpy(&into, &result, std::min(into.size, sizeof(Result)));
}

// Copies text into a field of fixed length, cut off if it is longer.
template <std::size_t length>
void copy_text(char (&field)[length], const std::string& text) {
  field[text.copy(field, length - 1)] = '\0';
}

}  // namespace shardcomm::abi
