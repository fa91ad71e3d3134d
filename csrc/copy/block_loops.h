// The loops that encode, decode and finish runs of whole blocks on a CPU; blocks_cpu.cpp cuts work
// into such runs.
#pragma once

#include <cstdint>

#include "copy/block_element.h"
#include "copy/blocks.h"
#include "copy/operation.h"

namespace shardcomm {

// `blocks` whole blocks from `src`, the first of which begins at element `first` of the wire.
struct EncodeRun {
  const void* src;
  std::int64_t blocks;
  int block;
  std::uint8_t* codes;
  std::uint8_t* scales;
  std::uint64_t seed;
  std::int64_t first;
  BlockTally* tally;
};

using EncodeKernel = void (*)(EncodeRun);
using DecodeKernel = void (*)(const std::uint8_t*, const std::uint8_t*, std::int64_t, int, void*);
using FinishKernel = void (*)(void*, const float*, std::int64_t, float, std::int32_t*);

// The loop for a format and the dtype of what it reads; with `tallies` it also counts the errors.
EncodeKernel encode_kernel(const BlockFormat& format, DType dtype, bool tallies);
// The loop for a format and the dtype of what it writes.
DecodeKernel decode_kernel(const BlockFormat& format, DType dtype);
// The same, which adds to floats.
DecodeKernel add_kernel(const BlockFormat& format);
// Rounds sums of floats to what the epilogue writes.
FinishKernel finish_kernel(const Epilogue& epilogue);

}  // namespace shardcomm
