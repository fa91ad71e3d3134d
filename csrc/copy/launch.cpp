#include "copy/launch.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace shardcomm {
namespace {

constexpr std::int64_t kTilesPerProcessor = 16;
constexpr std::int64_t kMostBatches = 4;
static_assert(kMostBatches * kBatchVectors * kBlockThreads * kVectorBytes <= kMostTileElements,
              "of the narrowest type, of one byte");

// A launch under construction, and where each operand of the plan stands in it.
class Filling {
 public:
  bool has_room_for(const Tile& tile, std::size_t most_operands) const {
    const std::size_t more = (tile.src != Segment::kZeros && sources_.count(tile.src) == 0) +
                             (destinations_.count(tile.dst) == 0);
    return launch_.operands() + more <= most_operands;
  }

  void add(Tile tile) {
    if (tile.src != Segment::kZeros) tile.src = place(tile.src, sources_, launch_.sources);
    tile.dst = place(tile.dst, destinations_, launch_.destinations);
    launch_.tiles.push_back(tile);
  }

  Launch finish() && {
    const auto num_sources = static_cast<std::int32_t>(launch_.sources.size());
    for (Tile& tile : launch_.tiles) tile.dst += num_sources;
    return std::move(launch_);
  }

 private:
  using Places = std::unordered_map<std::int32_t, std::int32_t>;

  static std::int32_t place(std::int32_t operand, Places& places,
                            std::vector<std::int32_t>& operands) {
    const auto [found, is_new] =
        places.emplace(operand, static_cast<std::int32_t>(operands.size()));
    if (is_new) operands.push_back(operand);
    return found->second;
  }

  Launch launch_;
  Places sources_;
  Places destinations_;
};

}  // namespace

std::vector<Launch> launches_of(const CopyPlan& plan, std::int64_t tile_elements,
                                std::size_t most_operands) {
  std::vector<Launch> launches;
  Filling filling;
  bool is_empty = true;
  for (const Tile& tile : plan.cut(tile_elements)) {
    if (!filling.has_room_for(tile, most_operands)) {
      launches.push_back(std::move(filling).finish());
      filling = {};
    }
    filling.add(tile);
    is_empty = false;
  }
  if (!is_empty) launches.push_back(std::move(filling).finish());
  return launches;
}

// A block of threads that takes a tile waits for the tile's description, and then for its first
// loads. The more loads a tile has, the less these waits weigh.
//
//   large plans    one to four batches, all threads of a block having full ones: larger tiles where
//                  there still are several for each of a processor's blocks, so that all processors
//                  end at about the same time;
//   middle-sized   a tile for each processor: less than a full batch for every thread, but a
//                  processor without a tile would save nobody anything;
//   small          one vector for each thread, on as many processors as that takes: a tile of fewer
//                  would leave threads idle, and take as long.
std::int64_t tile_elements_for(const CopyPlan& plan, std::int64_t processors) {
  const auto narrow =
      static_cast<std::int64_t>(std::min(itemsize(plan.src_dtype()), itemsize(plan.dst_dtype())));
  const std::int64_t vector_each = kBlockThreads * kVectorBytes / narrow;
  const std::int64_t batch_each = kBatchVectors * vector_each;
  const std::int64_t several = divide_up(plan.elements(), kTilesPerProcessor * processors);
  const std::int64_t one = divide_up(plan.elements(), processors);
  const std::int64_t large = std::clamp(several, batch_each, kMostBatches * batch_each);
  const std::int64_t tile = std::min(large, std::max(one, vector_each));
  return divide_up(tile, kCutElements) * kCutElements;
}

}  // namespace shardcomm
