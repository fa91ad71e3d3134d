// What all executors of block formats check, and where a wire part has its codes and scales.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/block_element.h"
#include "shardcomm/blocks.h"
#include "shardcomm/tile.h"

namespace shardcomm {

// These throw std::invalid_argument for what shardcomm/blocks.h says.
void check_format(const BlockFormat& format);
void check_wire(const BlockFormat& format, const void* wire, std::int64_t bytes, DType dtype);
void check_threads(int threads);
void check_parts(const BlockFormat& format, const void* wires, int parts, std::int64_t count,
                 const Epilogue& epilogue);

// Adds what a thread has seen to what a caller asks for; `stats` may be null. Several threads may
// add to the same numbers at once.
void report(const BlockTally& tally, BlockStats* stats);

// The segments that have elements, in the order of the wire.
template <class Segment>
std::vector<Segment> sorted(const BlockFormat& format, const std::vector<Segment>& segments,
                            std::int64_t blocks);

}  // namespace shardcomm
