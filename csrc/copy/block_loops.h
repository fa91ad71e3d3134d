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
  bool streaming;  // past the caches, where a loop can do that

  // What follows `done` blocks of such elements.
  template <class Src>
  EncodeRun after(std::int64_t done) const {
    const std::int64_t elements = done * block;
    return {static_cast<const Src*>(src) + elements,
            blocks - done,
            block,
            codes + elements,
            scales + done,
            seed,
            first + elements,
            tally,
            streaming};
  }
};

// The elements of `blocks` whole blocks, or their sums over `parts` wire parts, each `stride` bytes
// behind the one before, in this order. Sums are floats.
struct DecodeRun {
  const std::uint8_t* codes;  // of the first part
  const std::uint8_t* scales;
  int parts;
  std::int64_t stride;
  std::int64_t blocks;
  int block;
  void* dst;
  bool streaming;

  template <class Dst>
  DecodeRun after(std::int64_t done) const {
    const std::int64_t elements = done * block;
    return {codes + elements,
            scales + done,
            parts,
            stride,
            blocks - done,
            block,
            static_cast<Dst*>(dst) + elements,
            streaming};
  }
};

using EncodeKernel = void (*)(EncodeRun);
using DecodeKernel = void (*)(DecodeRun);
using FinishKernel = void (*)(void*, const float*, std::int64_t, float, std::int32_t*);

// The loop for a format and the dtype of what it reads; with `tallies` it also counts the errors.
EncodeKernel encode_kernel(const BlockFormat& format, DType dtype, bool tallies);
// The loop for a format and the dtype of what it writes.
DecodeKernel decode_kernel(const BlockFormat& format, DType dtype);
// Rounds sums of floats to what the epilogue writes.
FinishKernel finish_kernel(const Epilogue& epilogue);

}  // namespace shardcomm
