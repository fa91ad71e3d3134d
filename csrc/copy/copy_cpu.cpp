// The CPU executor of a CopyPlan: one kernel per dtype pair, chosen once; each thread runs its
// share of the tiles.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy/convert_cpu.h"
#include "copy/copy_bytes.h"
#include "copy/operation.h"
#include "copy/simd.h"
#include "copy/streaming.h"
#include "copy/workers.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/tile.h"

namespace shardcomm {
namespace {

// Shorter rows are not worth the partly written lines at their ends.
constexpr std::int64_t kStreamingRowBytes = 4096;

// Copies `count` elements of one row.
using RowKernel = void (*)(const void* src, void* dst, std::int64_t count, float scale,
                           std::int32_t* nonfinite);

template <class Copy>
struct Row {
  [[gnu::always_inline]] static void run(const void* src, void* dst, std::int64_t count,
                                         float scale, std::int32_t* nonfinite) {
    const auto* __restrict from = static_cast<const typename Copy::Src*>(src);
    auto* __restrict to = static_cast<typename Copy::Dst*>(dst);
    typename Copy::Side side;
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = Copy::apply(from[i], to[i], scale);
      side.wrote(to[i]);
    }
    report(side, nonfinite);
  }
};

// Null: bytes are copied as they are.
RowKernel row_kernel(DType src, DType dst, const CopyOptions& options) {
  RowKernel kernel = nullptr;
  visit_copy(src, dst, options, [&](auto copy) {
    using Copy = decltype(copy);
    if constexpr (!Copy::kMoves) kernel = best_of<Row<Copy>>();
  });
  return kernel;
}

// Whether so many bytes of destination are worth streaming.
bool is_worth_streaming(std::int64_t elements, std::int64_t dst_bytes) {
  return elements >= kStreamingRunBytes / dst_bytes;
}

// What is the same for every tile of a run.
struct Run {
  const void* const* sources;
  void* const* destinations;
  std::int64_t src_bytes;  // per element
  std::int64_t dst_bytes;
  RowKernel row_kernel;
  const CopyOptions& options;
  bool streaming;
};

void copy_row(const Run& run, const std::byte* src, std::byte* dst, std::int64_t count) {
  if (run.row_kernel != nullptr) {
    run.row_kernel(src, dst, count, run.options.scale, run.options.nonfinite);
  } else {
    copy_bytes(dst, src, static_cast<std::size_t>(count * run.dst_bytes));
  }
}

void copy_row_streaming(const Run& run, const std::byte* src, std::byte* dst, std::int64_t count) {
  // Small enough that the processor reads the next piece while it writes this one.
  constexpr std::int64_t kBufferBytes = 512;
  alignas(kLineBytes) std::byte buffer[kBufferBytes];
  const VectorSpan span =
      vector_span(reinterpret_cast<std::uintptr_t>(dst), count, run.dst_bytes, kLineBytes);
  copy_row(run, src, dst, span.head);
  src += span.head * run.src_bytes;
  dst += span.head * run.dst_bytes;
  if (run.row_kernel == nullptr) {
    copy_streaming(dst, src, span.body * run.dst_bytes);
    src += span.body * run.src_bytes;
    dst += span.body * run.dst_bytes;
  } else {
    const std::int64_t buffer_elements = kBufferBytes / run.dst_bytes;
    for (std::int64_t left = span.body; left > 0; left -= buffer_elements) {
      const std::int64_t n = std::min(left, buffer_elements);
      run.row_kernel(src, buffer, n, run.options.scale, run.options.nonfinite);
      copy_streaming(dst, buffer, n * run.dst_bytes);
      src += n * run.src_bytes;
      dst += n * run.dst_bytes;
    }
  }
  copy_row(run, src, dst, span.tail);
}

void copy_tile(const Run& run, const Tile& tile) {
  const void* src_operand = tile.src == Segment::kZeros ? nullptr : run.sources[tile.src];
  if (src_operand == nullptr && run.options.accumulate) return;
  const auto* src = static_cast<const std::byte*>(src_operand);
  auto* dst = static_cast<std::byte*>(run.destinations[tile.dst]);
  const std::int64_t row_bytes = tile.cols * run.dst_bytes;
  const bool streaming = run.streaming && row_bytes >= kStreamingRowBytes;
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    std::byte* dst_row = dst + dst_index(tile, row, 0) * run.dst_bytes;
    if (src == nullptr) {
      std::memset(dst_row, 0, static_cast<std::size_t>(row_bytes));
      continue;
    }
    const std::byte* src_row = src + src_index(tile, row, 0) * run.src_bytes;
    if (streaming) {
      copy_row_streaming(run, src_row, dst_row, tile.cols);
    } else {
      copy_row(run, src_row, dst_row, tile.cols);
    }
  }
}

using TileIterator = std::vector<Tile>::const_iterator;

void copy_tiles(const Run& run, TileIterator begin, TileIterator end) {
  for (; begin != end; ++begin) copy_tile(run, *begin);
  if (run.streaming) streaming_fence();
}

// Cuts the tiles into consecutive shares of about equally many elements; share t is [cuts[t],
// cuts[t + 1]).
std::vector<TileIterator> equal_shares(const CopyPlan& plan, std::int64_t shares) {
  std::vector<TileIterator> cuts{plan.tiles().begin()};
  std::int64_t elements = 0;
  for (auto tile = plan.tiles().begin(); tile != plan.tiles().end(); ++tile) {
    elements += tile->rows * tile->cols;
    while (static_cast<std::int64_t>(cuts.size()) < shares &&
           elements >=
               divide_up(plan.elements(), shares) * static_cast<std::int64_t>(cuts.size())) {
      cuts.push_back(tile + 1);
    }
  }
  cuts.resize(static_cast<std::size_t>(shares), plan.tiles().end());
  cuts.push_back(plan.tiles().end());
  return cuts;
}

}  // namespace

void check_options(const CopyPlan& plan, const CopyOptions& options) {
  const bool computes = options.scale != 1.0f || options.accumulate || options.nonfinite != nullptr;
  if (computes && !is_convertible(plan.dst_dtype())) {
    throw std::invalid_argument(
        std::string("scale, accumulate and nonfinite need f32, bf16 or f16, not ") +
        name(plan.dst_dtype()));
  }
}

void copy_cpu(const CopyPlan& plan, const void* const* sources, void* const* destinations,
              const CopyOptions& options, int threads) {
  check_options(plan, options);
  if (threads < 1) {
    throw std::invalid_argument("threads is " + std::to_string(threads) +
                                ", it must be at least 1");
  }
  const auto src_bytes = static_cast<std::int64_t>(itemsize(plan.src_dtype()));
  const auto dst_bytes = static_cast<std::int64_t>(itemsize(plan.dst_dtype()));
  // Accumulation has the destination in the cache already.
  const bool streaming = !options.accumulate && is_worth_streaming(plan.elements(), dst_bytes);
  const Run run{sources,
                destinations,
                src_bytes,
                dst_bytes,
                row_kernel(plan.src_dtype(), plan.dst_dtype(), options),
                options,
                streaming};

  const std::int64_t shares =
      std::max<std::int64_t>(1, smaller(threads, plan.elements() / kElementsPerThread));
  if (shares == 1) {
    copy_tiles(run, plan.tiles().begin(), plan.tiles().end());
    return;
  }
  const std::vector<TileIterator> cuts = equal_shares(plan, shares);
  Workers workers;
  for (std::size_t t = 1; t + 1 < cuts.size(); ++t) {
    workers.start([&run, &cuts, t] { copy_tiles(run, cuts[t], cuts[t + 1]); });
  }
  copy_tiles(run, cuts[0], cuts[1]);
}

void convert_cpu(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count) {
  if (count == 0 || (dst == src && dst_dtype == src_dtype)) return;
  const auto dst_bytes = static_cast<std::int64_t>(itemsize(dst_dtype));
  const CopyOptions options;
  const Run run{nullptr,
                nullptr,
                static_cast<std::int64_t>(itemsize(src_dtype)),
                dst_bytes,
                row_kernel(src_dtype, dst_dtype, options),
                options,
                is_worth_streaming(count, dst_bytes)};
  const auto* from = static_cast<const std::byte*>(src);
  auto* to = static_cast<std::byte*>(dst);
  if (!run.streaming) return copy_row(run, from, to, count);
  copy_row_streaming(run, from, to, count);
  streaming_fence();
}

}  // namespace shardcomm
