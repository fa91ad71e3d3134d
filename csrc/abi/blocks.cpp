// Block formats, in C.
#include "copy/blocks.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/arguments.h"
#include "abi/handles.h"
#include "abi/status.h"
#include "copy/blocks_cuda.h"
#include "shardcomm.h"
#include "shardcomm/blocks.h"
#include "shardcomm/dtype.h"
#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

using shardcomm::BlockFormat;
using shardcomm::BlockStats;
using shardcomm::abi::check_device;
using shardcomm::abi::dtype_of;
using shardcomm::abi::format_of;
using shardcomm::abi::guarded;
using shardcomm::abi::required;

namespace {

static_assert(sizeof(shc_block_stats) == sizeof(BlockStats) &&
              offsetof(shc_block_stats, seen) == offsetof(BlockStats, seen_bits) &&
              offsetof(shc_block_stats, flagged) == offsetof(BlockStats, flagged));

// The segments of `given`, whose pointers are called `pointer`, checked and in the order of the
// wire.
template <class Segment, class Given>
std::vector<Segment> segments_of(const BlockFormat& format, const Given* given, std::size_t count,
                                 const char* pointer, std::int64_t wire_bytes) {
  if (count > 0) required(given, "segments");
  std::vector<Segment> all;
  all.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto [at, elements, first_block] = given[i];
    if (at == nullptr && elements > 0) {
      throw std::invalid_argument("segments[" + std::to_string(i) + "]." + pointer + " is NULL");
    }
    all.push_back(Segment{at, elements, first_block});
  }
  return shardcomm::sorted(format, all, shardcomm::wire_blocks(format, wire_bytes));
}

}  // namespace

shc_status shc_wire_bytes(const shc_block_format* format, int64_t elements, int64_t* bytes) {
  return guarded("shc_wire_bytes", [&] {
    required(bytes, "bytes") = shardcomm::wire_bytes(format_of(format, "format"), elements);
  });
}

shc_status shc_encode(const shc_block_format* format, const shc_encoded_segment* segments,
                      size_t count, shc_dtype dtype, void* wire, int64_t wire_bytes, uint64_t seed,
                      shc_block_stats* stats, int threads, int device, shc_stream* stream) {
  return guarded("shc_encode", [&] {
    const BlockFormat how = format_of(format, "format");
    const shardcomm::DType type = dtype_of(dtype, "dtype");
    if (wire_bytes > 0) required(static_cast<std::byte*>(wire), "wire");
    shardcomm::check_wire(how, wire, wire_bytes, type);
    shardcomm::check_threads(threads);
    check_device(device);
    const auto from =
        segments_of<shardcomm::EncodedSegment>(how, segments, count, "src", wire_bytes);
    auto* tally = reinterpret_cast<BlockStats*>(stats);
    shardcomm::abi::run_on(stream, device, [=](shardcomm::NativeStream native) {
      if (device == shardcomm::abi::kHost) {
        shardcomm::encode_cpu(how, from, type, wire, wire_bytes, seed, tally, threads);
      } else {
        shardcomm::encode_cuda(how, from, type, wire, wire_bytes, seed, tally, native);
      }
    });
  });
}

shc_status shc_decode(const shc_block_format* format, const void* wire, int64_t wire_bytes,
                      const shc_decoded_segment* segments, size_t count, shc_dtype dtype,
                      int threads, int device, shc_stream* stream) {
  return guarded("shc_decode", [&] {
    const BlockFormat how = format_of(format, "format");
    const shardcomm::DType type = dtype_of(dtype, "dtype");
    if (wire_bytes > 0) required(static_cast<const std::byte*>(wire), "wire");
    shardcomm::check_wire(how, wire, wire_bytes, type);
    shardcomm::check_threads(threads);
    check_device(device);
    const auto to = segments_of<shardcomm::DecodedSegment>(how, segments, count, "dst", wire_bytes);
    shardcomm::abi::run_on(stream, device, [=](shardcomm::NativeStream native) {
      if (device == shardcomm::abi::kHost) {
        shardcomm::decode_cpu(how, wire, wire_bytes, to, type, threads);
      } else {
        shardcomm::decode_cuda(how, wire, wire_bytes, to, type, native);
      }
    });
  });
}

shc_status shc_decode_sum(const shc_block_format* format, const void* wires, int parts, void* dst,
                          int64_t count, shc_dtype dtype, const shc_copy_options* options,
                          int threads, int device, shc_stream* stream) {
  return guarded("shc_decode_sum", [&] {
    const BlockFormat how = format_of(format, "format");
    const shc_copy_options given =
        shardcomm::abi::options_of("options", options, shc_copy_options SHC_COPY_OPTIONS_INIT);
    const shardcomm::Epilogue epilogue{dtype_of(dtype, "dtype"), given.scale, given.accumulate != 0,
                                       given.nonfinite};
    if (count > 0) {
      required(static_cast<const std::byte*>(wires), "wires");
      required(static_cast<std::byte*>(dst), "dst");
    }
    shardcomm::check_parts(how, wires, parts, count, epilogue);
    shardcomm::check_threads(threads);
    check_device(device);
    shardcomm::abi::run_on(stream, device, [=](shardcomm::NativeStream native) {
      if (device == shardcomm::abi::kHost) {
        shardcomm::decode_sum_cpu(how, wires, parts, dst, count, epilogue, threads);
      } else {
        shardcomm::decode_sum_cuda(how, wires, parts, dst, count, epilogue, native);
      }
    });
  });
}
