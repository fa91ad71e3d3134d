// The body of the CUDA copy kernel: what thread `thread` of block `block` does. Plain C++, so that
// a CPU test can walk every block and thread of a launch through it.
//
//   tile t  ──►  block t % blocks      elements of a row, destination bf16:
//                                      head      body: vectors of 8           tail
//                                      . . .  |xxxxxxxx|xxxxxxxx|xxxxxxxx|  . .
//                                      thread:    0        1        2
#pragma once

#include <cstdint>
#include <cstring>

#include "copy/operation.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/tile.h"

namespace shardcomm {

constexpr int kVectorBytes = 16;

// The pointers of a launch travel as kernel arguments: first the sources, then the destinations.
template <int kCapacity>
struct Operands {
  static constexpr int kMost = kCapacity;
  const void* at[kCapacity];
};

// Elements of one access, a multiple of 16 bytes on both sides.
template <class Copy>
constexpr int kVectorElements =
    kVectorBytes / static_cast<int>(sizeof(typename Copy::Src) < sizeof(typename Copy::Dst)
                                        ? sizeof(typename Copy::Src)
                                        : sizeof(typename Copy::Dst));

template <class T, int kElements>
struct alignas(kElements * sizeof(T) < kVectorBytes ? kElements * sizeof(T) : kVectorBytes) Vector {
  T at[kElements];
};

SHARDCOMM_HOST_DEVICE inline bool is_vector_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kVectorBytes == 0;
}

// `is_whole`: in accesses of 16 bytes; otherwise element by element, for addresses that do not
// allow more.
template <class T, int kElements>
SHARDCOMM_HOST_DEVICE inline Vector<T, kElements> load_vector(const T* from, bool is_whole) {
  if (is_whole) return *reinterpret_cast<const Vector<T, kElements>*>(from);
  Vector<T, kElements> vector;
  for (int i = 0; i < kElements; ++i) vector.at[i] = from[i];
  return vector;
}

template <class T, int kElements>
SHARDCOMM_HOST_DEVICE inline void store_vector(T* to, const Vector<T, kElements>& vector,
                                               bool is_whole) {
  if (is_whole) {
    *reinterpret_cast<Vector<T, kElements>*>(to) = vector;
  } else {
    for (int i = 0; i < kElements; ++i) to[i] = vector.at[i];
  }
}

// A vector on its way through registers. As words, which nothing has to take apart before it is
// used: as elements of 16 bits, each load would be waited for before the next is issued.
template <class T, int kElements>
struct alignas(kVectorBytes) Words {
  std::uint32_t at[sizeof(Vector<T, kElements>) / sizeof(std::uint32_t)];
};

template <class T, int kElements>
SHARDCOMM_HOST_DEVICE inline Words<T, kElements> load_words(const T* from, bool is_whole) {
  if (is_whole) return *reinterpret_cast<const Words<T, kElements>*>(from);
  const auto vector = load_vector<T, kElements>(from, false);
  Words<T, kElements> words;
  memcpy(&words, &vector, sizeof(words));
  return words;
}

// Where the vectors of a tile are.
struct VectorGrid {
  std::uint32_t rows;
  std::uint32_t per_row;
  std::uint32_t head;  // elements before the first
  std::int64_t src_pitch;
  std::int64_t dst_pitch;
};

// `kBatch` vectors of one thread, `threads` apart, from `first` on.
template <class Copy, bool kWhole, int kBatch>
SHARDCOMM_HOST_DEVICE inline void copy_batch(const VectorGrid& grid,
                                             const typename Copy::Src* __restrict src,
                                             typename Copy::Dst* __restrict dst, float scale,
                                             std::uint32_t first, std::uint32_t threads,
                                             typename Copy::Side& side) {
  using Src = typename Copy::Src;
  using Dst = typename Copy::Dst;
  constexpr int kElements = kVectorElements<Copy>;
  Words<Src, kElements> from[kBatch] = {};
  Words<Dst, kElements> to[kBatch] = {};
  std::int64_t at[kBatch] = {};
  for (int k = 0; k < kBatch; ++k) {
    const std::uint32_t index = first + static_cast<std::uint32_t>(k) * threads;
    const std::uint32_t row = grid.rows == 1 ? 0 : index / grid.per_row;
    const std::int64_t col = grid.head + (index - row * grid.per_row) * kElements;
    at[k] = row * grid.dst_pitch + col;
    if (src != nullptr) {
      from[k] = load_words<Src, kElements>(src + row * grid.src_pitch + col, kWhole);
    }
    if (Copy::kAccumulates) to[k] = load_words<Dst, kElements>(dst + at[k], kWhole);
  }
  for (int k = 0; k < kBatch; ++k) {
    if constexpr (Copy::kMoves && kWhole) {
      *reinterpret_cast<Words<Dst, kElements>*>(dst + at[k]) = from[k];
    } else {
      Vector<Src, kElements> read;
      Vector<Dst, kElements> written;
      memcpy(&read, &from[k], sizeof(read));
      memcpy(&written, &to[k], sizeof(written));
      for (int i = 0; i < kElements; ++i) {
        written.at[i] = src == nullptr ? Dst{} : Copy::apply(read.at[i], written.at[i], scale);
        side.wrote(written.at[i]);
      }
      store_vector(dst + at[k], written, kWhole);
    }
  }
}

template <class Copy, bool kWhole>
SHARDCOMM_HOST_DEVICE inline void copy_vectors(const VectorGrid& grid,
                                               const typename Copy::Src* __restrict src,
                                               typename Copy::Dst* __restrict dst, float scale,
                                               std::uint32_t thread, std::uint32_t threads,
                                               typename Copy::Side& side) {
  // Loads in flight per thread before the first store: what hides the latency of memory.
  constexpr std::uint32_t kBatch = 4;
  const std::uint32_t vectors = grid.rows * grid.per_row;
  std::uint32_t next = thread;
  for (; next + (kBatch - 1) * threads < vectors; next += kBatch * threads) {
    copy_batch<Copy, kWhole, kBatch>(grid, src, dst, scale, next, threads, side);
  }
  for (; next < vectors; next += threads) {
    copy_batch<Copy, kWhole, 1>(grid, src, dst, scale, next, threads, side);
  }
}

// One thread's share of one tile. `src`: the first element; null: zeros.
template <class Copy>
SHARDCOMM_HOST_DEVICE inline void copy_share(const Tile& tile,
                                             const typename Copy::Src* __restrict src,
                                             typename Copy::Dst* __restrict dst, float scale,
                                             std::uint32_t thread, std::uint32_t threads,
                                             typename Copy::Side& side) {
  using Src = typename Copy::Src;
  using Dst = typename Copy::Dst;
  constexpr int kElements = kVectorElements<Copy>;

  // The side of the narrower type sets where vectors begin. Rows that lie differently to the vector
  // boundaries have no common head: element by element then.
  const bool src_is_narrow = src != nullptr && sizeof(Src) < sizeof(Dst);
  const auto narrow = reinterpret_cast<std::uintptr_t>(
      src_is_narrow ? static_cast<const void*>(src) : static_cast<const void*>(dst));
  constexpr auto kNarrowBytes = static_cast<std::int64_t>(kVectorBytes / kElements);
  VectorSpan span = vector_span(narrow, tile.cols, kNarrowBytes, kVectorBytes);
  const bool is_regular =
      tile.rows == 1 ||
      (tile.dst_pitch * static_cast<std::int64_t>(sizeof(Dst)) % kVectorBytes == 0 &&
       tile.src_pitch * static_cast<std::int64_t>(sizeof(Src)) % kVectorBytes == 0);
  if (!is_regular) span = {tile.cols, 0, 0};
  const auto head = static_cast<std::uint32_t>(span.head);
  const auto singles = static_cast<std::uint32_t>(span.head + span.tail);
  const auto rows = static_cast<std::uint32_t>(tile.rows);
  const VectorGrid grid{rows, static_cast<std::uint32_t>(span.body) / kElements, head,
                        tile.src_pitch, tile.dst_pitch};
  if ((src == nullptr || is_vector_aligned(src + head)) && is_vector_aligned(dst + head)) {
    copy_vectors<Copy, true>(grid, src, dst, scale, thread, threads, side);
  } else {
    copy_vectors<Copy, false>(grid, src, dst, scale, thread, threads, side);
  }
  for (std::uint32_t index = thread; index < rows * singles; index += threads) {
    const std::uint32_t row = rows == 1 ? 0 : index / singles;
    const std::uint32_t single = index - row * singles;
    const std::int64_t col = single < head ? single : single + span.body;
    Dst& to = dst[row * tile.dst_pitch + col];
    to = src == nullptr ? Dst{} : Copy::apply(src[row * tile.src_pitch + col], to, scale);
    side.wrote(to);
  }
}

// `tiles` of a launch with `blocks` blocks; operands are indices into `operands`.
template <class Copy, int kCapacity>
SHARDCOMM_HOST_DEVICE inline void copy_as_thread(const Tile* tiles, std::uint32_t num_tiles,
                                                 const Operands<kCapacity>& operands, float scale,
                                                 std::uint32_t block, std::uint32_t blocks,
                                                 std::uint32_t thread, std::uint32_t threads,
                                                 typename Copy::Side& side) {
  for (std::uint32_t t = block; t < num_tiles; t += blocks) {
    const Tile tile = tiles[t];
    const void* src = tile.src == Segment::kZeros ? nullptr : operands.at[tile.src];
    if (src == nullptr && Copy::kAccumulates) continue;
    auto* dst = static_cast<typename Copy::Dst*>(const_cast<void*>(operands.at[tile.dst]));
    const auto* from = static_cast<const typename Copy::Src*>(src);
    copy_share<Copy>(tile, from == nullptr ? nullptr : from + tile.src_offset,
                     dst + tile.dst_offset, scale, thread, threads, side);
  }
}

}  // namespace shardcomm
