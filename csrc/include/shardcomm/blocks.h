// Elements of 8 bits that share a scale in blocks, after the OCP Microscaling specification (MX)
// 1.0: gradients and parameters take a quarter of float32's bytes on the wire, and their errors
// have a bound that is known.
//
// A block has 32 (MX's own number), 64 or 128 elements, and one scale byte s, which stands for
// 2^(s - 127); 255 stands for NaN. With the code c of an element, its value is
//
//   mxint8:  c / 64 * 2^(s - 127)     c is an int8 from -127 to 127
//   mxfp8:   c * 2^(s - 127)          c is an OCP E4M3, whose largest value is 448
//
// s is the smallest with which no code saturates: the largest |element| of the block is at most
// 127 / 64 * 2^(s - 127), or 448 * 2^(s - 127). (The specification proposes floor(log2) of it,
// with which elements between 448 and 512 times the scale would lose up to 12.5 %.) A block that
// contains NaN or Inf is flagged: its s is 255, its codes are 0, and all of it decodes to NaN. A
// block of zeros has s = 0 and codes of zero.
//
// A wire part of n elements, here of 5 blocks, is
//
//   | codes of block 0 | 1 | 2 | 3 | 4 |   | s s s s s |   | rounded up to 128 bytes
//
// It has as many blocks as its bytes have room for, so that its bytes alone say where everything
// is. They are up to 3 more than n elements need.
#pragma once

#include <cstdint>
#include <vector>

#include "shardcomm/dtype.h"
#include "shardcomm/reduce.h"

namespace shardcomm {

enum class BlockCode : std::uint8_t { mxint8, mxfp8 };

// To nearest, ties to even; or up or down at random, so that the mean over seeds is the element.
enum class Rounding : std::uint8_t { nearest, stochastic };

struct BlockFormat {
  BlockCode code = BlockCode::mxint8;
  int block = 32;
  Rounding rounding = Rounding::nearest;
};

constexpr std::int64_t kWireAlignBytes = 128;

// The bytes of a wire part of `elements` elements, a multiple of 128. Throws std::invalid_argument
// for a block of another size than 32, 64 or 128, and a count that is negative or whose bytes pass
// 2^63.
std::int64_t wire_bytes(const BlockFormat& format, std::int64_t elements);

// The blocks of a wire part of so many bytes.
constexpr std::int64_t wire_blocks(const BlockFormat& format, std::int64_t bytes) {
  return bytes / (format.block + 1);
}

// `count` elements in memory, which stand in the blocks of the wire from `first_block` on. The last
// of these blocks may be partial; the rest of it is zeros.
struct EncodedSegment {
  const void* src = nullptr;
  std::int64_t count = 0;
  std::int64_t first_block = 0;
};
struct DecodedSegment {
  void* dst = nullptr;
  std::int64_t count = 0;
  std::int64_t first_block = 0;
};

// What encoding has cost. It grows with every call that is given it: the first two are maxima, the
// third is a sum. The bits of a float that is not negative, as an integer, have its order.
//
// No element of the blocks that were not flagged differs from its value on the wire by more than
// the bound. To nearest, the bound of a block is half a step of mxint8, 2^(s - 134), or for mxfp8
// max(largest |element| * 2^-4, 2^(s - 137)). It is twice that with stochastic rounding, and for
// mxint8 also where an element is above 127 / 64 * 2^127, which saturates.
struct BlockStats {
  std::uint32_t bound_bits = 0;  // of a float: the largest bound of a block
  std::uint32_t seen_bits = 0;   // of a float: the largest difference
  std::int32_t flagged = 0;      // how many blocks have a NaN or Inf
};

// Writes all blocks of a wire part; those that no segment covers are zeros. `dtype` is f32, bf16 or
// f16. Stochastic rounding takes the word e % 4 of Philox4x32-10 with key `seed` and counter e / 4
// for the element that is the e-th of the wire. `stats` may be null. The wire and its bytes are
// aligned to 128. Small parts run on fewer threads than given.
//
// The same bits on every processor, whether it flushes subnormals to zero or not (but `seen_bits`:
// there differences below 2^-126 then count as 0). Throws std::invalid_argument for a format as
// wire_bytes does, for another dtype, segments that overlap or lie outside the wire, a wire that
// is not aligned, and threads < 1.
void encode_cpu(const BlockFormat& format, const std::vector<EncodedSegment>& segments, DType dtype,
                void* wire, std::int64_t bytes, std::uint64_t seed, BlockStats* stats,
                int threads = 1);

// Writes the elements of the segments, rounded to `dtype`. Throws as encode_cpu does.
void decode_cpu(const BlockFormat& format, const void* wire, std::int64_t bytes,
                const std::vector<DecodedSegment>& segments, DType dtype, int threads = 1);

// dst[i] = epilogue(part 0's element i + part 1's + ... ), added in float32 in this order. Part p
// begins p * wire_bytes(format, count) bytes behind `wires`. Throws as encode_cpu does, for an
// epilogue dtype other than f32, bf16 and f16, parts < 1 and count < 0.
void decode_sum_cpu(const BlockFormat& format, const void* wires, int parts, void* dst,
                    std::int64_t count, const Epilogue& epilogue, int threads = 1);

}  // namespace shardcomm
