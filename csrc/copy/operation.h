// What a copy does to an element, on a CPU and on CUDA.
#pragma once

#include <cstdint>

#include "copy/nonfinite.h"
#include "shardcomm/copy_plan.h"

namespace shardcomm {

// An element operation. `Src` and `Dst` are the types of one element, `apply` returns what is
// stored in the destination, and a `Side`, of which each thread has one, takes note of what was
// stored.
template <class SrcType, class DstType>
struct Converted {
  using Src = SrcType;
  using Dst = DstType;
  using Side = Unwatched;
  static constexpr bool kAccumulates = false;
  static constexpr bool kMoves = false;
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static Dst apply(Src src, Dst, float scale) {
    Dst result;
    store(result, scale * load(src));
    return result;
  }
};

template <class SrcType, class DstType>
struct Accumulated {
  using Src = SrcType;
  using Dst = DstType;
  using Side = Unwatched;
  static constexpr bool kAccumulates = true;
  static constexpr bool kMoves = false;
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static Dst apply(Src src, Dst dst, float scale) {
    Dst result;
    store(result, load(dst) + scale * load(src));
    return result;
  }
};

template <class Bits>
struct Moved {
  using Src = Bits;
  using Dst = Bits;
  using Side = Unwatched;
  static constexpr bool kAccumulates = false;
  static constexpr bool kMoves = true;  // copies the bits as they are
  SHARDCOMM_HOST_DEVICE static Dst apply(Src src, Dst, float) { return src; }
};

// Does what `Copy` does, and looks for NaN and Inf in what it writes.
template <class Copy>
struct Watched : Copy {
  using Side = Watch<typename Copy::Dst>;
};

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

template <class Visitor>
void visit_moved(DType dtype, const Visitor& visitor) {
  switch (itemsize(dtype)) {
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

}  // namespace detail

// Calls `visitor` with the element operation (an empty object) of a copy that only converts.
template <class Visitor>
void visit_conversion(DType src_dtype, DType dst_dtype, const Visitor& visitor) {
  if (src_dtype != dst_dtype) return detail::visit_src<Converted>(src_dtype, dst_dtype, visitor);
  return detail::visit_moved(src_dtype, visitor);
}

// Calls `visitor` with the element operation that a GPU's kernel needs for a copy with these
// options. An operation that computes always looks for NaN and Inf, asked or not: that costs a few
// integer operations beside accesses to memory, and twice as many kernels would cost more.
template <class Visitor>
void visit_kernel_copy(DType src_dtype, DType dst_dtype, const CopyOptions& options,
                       const Visitor& visitor) {
  if (options.accumulate) {
    return detail::visit_src<detail::WatchedAccumulated>(src_dtype, dst_dtype, visitor);
  }
  if (src_dtype != dst_dtype || options.scale != 1.0f || options.nonfinite != nullptr) {
    return detail::visit_src<detail::WatchedConverted>(src_dtype, dst_dtype, visitor);
  }
  return detail::visit_moved(src_dtype, visitor);
}

// Calls `visitor` with the element operation that the CPU needs for a copy with these options.
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

}  // namespace shardcomm
