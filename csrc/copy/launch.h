// A CopyPlan as the CUDA executor runs it: launches, and for each the element operation.
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

// Tiles small enough that `workers` all have several, and large enough to be worth a look-up.
std::int64_t tile_elements_for(const CopyPlan& plan, std::int64_t workers);

namespace detail {

template <template <class, class> class Copy, class Src, class Visitor>
void visit_dst(DType dst_dtype, const Visitor& visitor) {
  switch (dst_dtype) {
    case DType::f16:
      return visitor(Copy<Src, Half>{});
    case DType::bf16:
      return visitor(Copy<Src, BFloat16>{});
    default:
      return visitor(Copy<Src, float>{});
  }
}

template <class Src, class Dst>
using WatchedConverted = Watched<Converted<Src, Dst>>;
template <class Src, class Dst>
using WatchedAccumulated = Watched<Accumulated<Src, Dst>>;

template <template <class, class> class Copy, class Visitor>
void visit_src(DType src_dtype, DType dst_dtype, const Visitor& visitor) {
  switch (src_dtype) {
    case DType::f16:
      return visit_dst<Copy, Half>(dst_dtype, visitor);
    case DType::bf16:
      return visit_dst<Copy, BFloat16>(dst_dtype, visitor);
    default:
      return visit_dst<Copy, float>(dst_dtype, visitor);
  }
}

}  // namespace detail

// Calls `visitor` with the element operation (an empty object) of a mere conversion.
template <class Visitor>
void visit_conversion(DType src_dtype, DType dst_dtype, const Visitor& visitor) {
  if (src_dtype != dst_dtype) return detail::visit_src<Converted>(src_dtype, dst_dtype, visitor);
  switch (itemsize(src_dtype)) {
    case 1:
      return visitor(Moved<std::uint8_t>{});
    case 2:
      return visitor(Moved<std::uint16_t>{});
    case 4:
      return visitor(Moved<std::uint32_t>{});
    default:
      return visitor(Moved<std::uint64_t>{});
  }
}

// The same for a copy with these options.
template <class Visitor>
void visit_copy(DType src_dtype, DType dst_dtype, const CopyOptions& options,
                const Visitor& visitor) {
  if (options.nonfinite != nullptr) {
    return options.accumulate
               ? detail::visit_src<detail::WatchedAccumulated>(src_dtype, dst_dtype, visitor)
               : detail::visit_src<detail::WatchedConverted>(src_dtype, dst_dtype, visitor);
  }
  if (options.accumulate) return detail::visit_src<Accumulated>(src_dtype, dst_dtype, visitor);
  if (options.scale != 1.0f) return detail::visit_src<Converted>(src_dtype, dst_dtype, visitor);
  return visit_conversion(src_dtype, dst_dtype, visitor);
}

// The CUDA kernel's code on the CPU, block by block and thread by thread: shows without a GPU what
// it would do there.
void walk_launches(const CopyPlan& plan, const void* const* sources, void* const* destinations,
                   const CopyOptions& options, std::int64_t tile_elements,
                   std::size_t most_operands, std::uint32_t blocks, std::uint32_t threads);

}  // namespace shardcomm
