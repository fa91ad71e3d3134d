#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "copy/kernels.h"
#include "shardcomm/copy_plan.h"

namespace shardcomm {
namespace {

bool is_plain(const CopyPlan& plan, const CopyOptions& options) {
  return plan.src_dtype() == plan.dst_dtype() && options.scale == 1.0f && !options.accumulate;
}

void check(const CopyPlan& plan, const CopyOptions& options) {
  const DType dtype = plan.src_dtype();
  const bool converts = dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
  if (!converts && !is_plain(plan, options)) {
    throw std::invalid_argument(std::string("copy: scale and accumulate take f32, bf16 or f16; "
                                            "the plan's dtype is ") +
                                name(dtype));
  }
  if (options.threads < 1) {
    throw std::invalid_argument("copy: threads is " + std::to_string(options.threads) +
                                "; it must be at least 1");
  }
}

class TileCopier {
 public:
  TileCopier(const CopyPlan& plan, const void* const* sources, void* const* destinations,
             const CopyOptions& options)
      : plan_(plan),
        sources_(sources),
        destinations_(destinations),
        options_(options),
        plain_(is_plain(plan, options)),
        src_size_(static_cast<std::int64_t>(itemsize(plan.src_dtype()))),
        dst_size_(static_cast<std::int64_t>(itemsize(plan.dst_dtype()))) {}

  void operator()(const Tile& tile) const {
    const auto* src = tile.src == Segment::kZeros
                          ? nullptr
                          : static_cast<const std::byte*>(sources_[tile.src]);
    if (src == nullptr && options_.accumulate) return;  // adding zeros
    auto* dst = static_cast<std::byte*>(destinations_[tile.dst]);
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      void* to = dst + (tile.dst_offset + row * tile.dst_pitch) * dst_size_;
      if (src == nullptr) {
        std::memset(to, 0, static_cast<std::size_t>(tile.cols * dst_size_));
        continue;
      }
      copy_row(to, src + (tile.src_offset + row * tile.src_pitch) * src_size_, tile.cols);
    }
  }

 private:
  void copy_row(void* to, const void* from, std::int64_t count) const {
    if (plain_) {
      std::memcpy(to, from, static_cast<std::size_t>(count * dst_size_));
    } else {
      kernels().convert(to, plan_.dst_dtype(), from, plan_.src_dtype(), count, options_.scale,
                        options_.accumulate);
    }
  }

  const CopyPlan& plan_;
  const void* const* sources_;
  void* const* destinations_;
  const CopyOptions& options_;
  bool plain_;
  std::int64_t src_size_;
  std::int64_t dst_size_;
};

}  // namespace

void copy_cpu(const CopyPlan& plan, const void* const* sources, void* const* destinations,
              const CopyOptions& options) {
  check(plan, options);
  const TileCopier copy(plan, sources, destinations, options);
  const std::vector<Tile>& tiles = plan.tiles();
  const std::size_t share =
      (tiles.size() + static_cast<std::size_t>(options.threads) - 1) / options.threads;
  const auto run = [&](std::size_t begin) {
    const std::size_t end = std::min(begin + share, tiles.size());
    for (std::size_t i = begin; i < end; ++i) copy(tiles[i]);
  };
  std::vector<std::thread> helpers;
  for (std::size_t begin = share; begin < tiles.size(); begin += share) {
    helpers.emplace_back(run, begin);
  }
  run(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace shardcomm
