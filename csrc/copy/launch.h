// A CopyPlan cut into launches, as the CUDA executor runs it.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/thread_copy.h"
#include "shardcomm/copy_plan.h"

namespace shardcomm {

// Tiles whose operands fit into the arguments of one kernel. A tile's `src` and `dst` are indices
// into those arguments: first come the sources listed here, then the destinations.
struct Launch {
  std::vector<Tile> tiles;
  std::vector<std::int32_t> sources;
  std::vector<std::int32_t> destinations;

  std::size_t operands() const { return sources.size() + destinations.size(); }
};

// Kernel arguments may have 32,764 bytes since CUDA 12.1: a plan of more operands takes more
// launches. Few operands travel in a smaller kernel's arguments, which costs the host less.
constexpr int kFewOperands = 256;
constexpr int kMostOperands = 4000;

std::vector<Launch> launches_of(const CopyPlan& plan, std::int64_t tile_elements,
                                std::size_t most_operands = kMostOperands);

// The number of elements that a tile should have on a device with `processors` multiprocessors.
std::int64_t tile_elements_for(const CopyPlan& plan, std::int64_t processors);

// Runs the CUDA kernel's code on the CPU, block by block and thread by thread. It shows without a
// GPU what the kernel would do on one.
void walk_launches(const CopyPlan& plan, const void* const* sources, void* const* destinations,
                   const CopyOptions& options, std::int64_t tile_elements,
                   std::size_t most_operands, std::uint32_t blocks, std::uint32_t threads);

}  // namespace shardcomm
