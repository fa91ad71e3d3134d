// Apart from launch.cpp, since these loops, which tests alone run, take long to optimise.
#include <memory>
#include <stdexcept>
#include <string>

#include "copy/launch.h"

namespace shardcomm {

void walk_launches(const CopyPlan& plan, const void* const* sources, void* const* destinations,
                   const CopyOptions& options, std::int64_t tile_elements,
                   std::size_t most_operands, std::uint32_t blocks, std::uint32_t threads) {
  check_options(plan, options);
  if (tile_elements < kCutElements || tile_elements % kCutElements != 0 ||
      tile_elements > kMostTileElements) {
    throw std::invalid_argument("tile_elements is " + std::to_string(tile_elements) +
                                ", it must be a positive multiple of " +
                                std::to_string(kCutElements) + ", at most " +
                                std::to_string(kMostTileElements));
  }
  if (most_operands < 2 || most_operands > kMostOperands || blocks < 1 || threads < 1) {
    throw std::invalid_argument("a launch has 2 to " + std::to_string(kMostOperands) +
                                " operands, and at least one block and thread");
  }
  const auto operands = std::make_unique<Operands<kMostOperands>>();
  for (const Launch& launch : launches_of(plan, tile_elements, most_operands)) {
    auto* at = operands->at;
    for (const std::int32_t source : launch.sources) *at++ = sources[source];
    for (const std::int32_t destination : launch.destinations) *at++ = destinations[destination];
    visit_kernel_copy(plan.src_dtype(), plan.dst_dtype(), options, [&](auto copy) {
      using Copy = decltype(copy);
      for (std::uint32_t block = 0; block < blocks; ++block) {
        for (std::uint32_t thread = 0; thread < threads; ++thread) {
          typename Copy::Side side;
          copy_as_thread<Copy>(launch.tiles.data(), static_cast<std::uint32_t>(launch.tiles.size()),
                               *operands, options.scale, block, blocks, thread, threads, side);
          report(side, options.nonfinite);
        }
      }
    });
  }
}

}  // namespace shardcomm
