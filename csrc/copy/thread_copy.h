// The body of the CUDA copy kernel: what thread `thread` of block `block` does. Plain C++, so that
// a CPU test can walk every block and thread of a launch through it.
//
//   tile t  ──►  block t % blocks      elements of a row, destination bf16:
//                                      head      body: vectors of 8           tail
//                                      . . .  |xxxxxxxx|xxxxxxxx|xxxxxxxx|  . .
//                                      thread:    0        1        2
//
// Vectors need all rows of a tile, on both sides, to lie alike to the boundaries of vectors. A tile
// whose rows do not is copied element by element: the 32 elements that a warp copies at a time then
// lie side by side, wherever they begin.
#pragma once

#include <cstdint>
#include <cstring>

#include "copy/operation.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/tile.h"

namespace shardcomm {

constexpr int kVectorBytes = 16;
constexpr int kBlockThreads = 256;
// The loads that a thread has under way before its first store: these hide the latency of memory.
constexpr int kBatchVectors = 4;
constexpr int kBatchElements = 8;
// The most elements that a tile of several rows may have.
constexpr std::int64_t kMostTileElements = 1 << 16;

// The pointers of a launch travel as kernel arguments: first the sources, then the destinations.
template <int kCapacity>
struct Operands {
  static constexpr int kMost = kCapacity;
  const void* at[kCapacity];
};

// The elements of one vector: as many as make 16 bytes of the narrower type, and so a multiple of
// 16 bytes on both sides.
template <class Src, class Dst>
constexpr int kVectorElements =
    kVectorBytes / static_cast<int>(sizeof(Src) < sizeof(Dst) ? sizeof(Src) : sizeof(Dst));

SHARDCOMM_HOST_DEVICE inline bool is_vector_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kVectorBytes == 0;
}

template <class T, int kElements>
struct Elements {
  T at[kElements];
};

// 16 bytes on their way through registers. They stay whole until they are used: as elements of 16
// bits they would be taken apart at once, and each load would be waited for before the next is
// issued.
struct alignas(kVectorBytes) Word {
  std::uint32_t at[4];
};

// Stores a word in one access. Left to itself, nvcc splits some stores in four. It also moves loads
// past the stores of other vectors, down to where they are used: there the wait for one load hides
// no other load.
SHARDCOMM_HOST_DEVICE inline void store_word(Word* to, const Word& word) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(word.at[0]), "r"(word.at[1]), "r"(word.at[2]), "r"(word.at[3])
               : "memory");
#else
  *to = word;
#endif
}

// A vector of `kElements` elements, as whole words.
template <class T, int kElements>
struct Words {
  Word at[kElements * sizeof(T) / sizeof(Word)];
};

template <class T, int kElements>
SHARDCOMM_HOST_DEVICE inline Words<T, kElements> load_words(const T* from) {
  return *reinterpret_cast<const Words<T, kElements>*>(from);
}

template <class T, int kElements>
SHARDCOMM_HOST_DEVICE inline void store_words(T* to, const Words<T, kElements>& words) {
  auto* at = reinterpret_cast<Word*>(to);
  for (const Word& word : words.at) store_word(at++, word);
}

template <class T, int kElements>
SHARDCOMM_HOST_DEVICE inline Elements<T, kElements> elements_of(const Words<T, kElements>& words) {
  Elements<T, kElements> elements;
  memcpy(&elements, &words, sizeof(elements));
  return elements;
}

template <class T, int kElements>
SHARDCOMM_HOST_DEVICE inline void store_vector(T* to, const Elements<T, kElements>& elements) {
  Words<T, kElements> words;
  memcpy(&words, &elements, sizeof(words));
  store_words(to, words);
}

// What a thread holds of one access: a vector's words, or (kElements = 1) one element.
template <class T, int kElements>
struct Access {
  using Held = Words<T, kElements>;
  SHARDCOMM_HOST_DEVICE static Held load(const T* from) { return load_words<T, kElements>(from); }
  SHARDCOMM_HOST_DEVICE static void store(T* to, const Held& held) { store_words(to, held); }
  SHARDCOMM_HOST_DEVICE static Elements<T, kElements> elements(const Held& held) {
    return elements_of<T, kElements>(held);
  }
};
template <class T>
struct Access<T, 1> {
  using Held = Elements<T, 1>;
  SHARDCOMM_HOST_DEVICE static Held load(const T* from) { return {{*from}}; }
  SHARDCOMM_HOST_DEVICE static void store(T* to, const Held& held) { *to = held.at[0]; }
  SHARDCOMM_HOST_DEVICE static Held elements(const Held& held) { return held; }
};

// Writes zeros where `Copy` would write, and reads nothing.
template <class Copy>
struct Zeroed {
  using Src = typename Copy::Dst;
  using Dst = typename Copy::Dst;
  using Side = Unwatched;
  static constexpr bool kAccumulates = false;
  static constexpr bool kMoves = true;
};
template <class Copy>
constexpr bool kReads = true;
template <class Copy>
constexpr bool kReads<Zeroed<Copy>> = false;

// The accesses to a tile: `per_row` in each row, of `elements` elements each, from column `first`
// on. Behind the first `head` accesses of a row, `gap` elements are left out.
class Accesses {
 public:
  SHARDCOMM_HOST_DEVICE Accesses(const Tile& tile, std::uint32_t per_row, std::uint32_t elements,
                                 std::int64_t first, std::int64_t head, std::int64_t gap)
      : count_(static_cast<std::uint32_t>(tile.rows) * per_row),
        per_row_(per_row),
        rows_each_(tile.rows == 1 ? 0 : ((std::uint32_t{1} << 31) + per_row - 1) / per_row),
        elements_(elements),
        first_(first),
        head_(static_cast<std::uint32_t>(head)),
        gap_(gap),
        src_pitch_(tile.src_pitch),
        dst_pitch_(tile.dst_pitch) {}
  SHARDCOMM_HOST_DEVICE std::uint32_t count() const { return count_; }

  struct Place {
    std::int64_t src;
    std::int64_t dst;
  };
  SHARDCOMM_HOST_DEVICE Place at(std::uint32_t index) const {
    // index / per_row_, by a multiplication. With two rows or more, it is exact below
    // kMostTileElements.
    const auto row = static_cast<std::uint32_t>((std::uint64_t{index} * rows_each_) >> 31);
    const std::uint32_t single = index - row * per_row_;
    const std::int64_t col =
        first_ + std::int64_t{single} * elements_ + (single < head_ ? 0 : gap_);
    return {row * src_pitch_ + col, row * dst_pitch_ + col};
  }

 private:
  std::uint32_t count_;
  std::uint32_t per_row_;
  std::uint32_t rows_each_;  // 2^31 / per_row_, rounded up; 0: there is one row
  std::uint32_t elements_;
  std::int64_t first_;
  std::uint32_t head_;
  std::int64_t gap_;
  std::int64_t src_pitch_;
  std::int64_t dst_pitch_;
};

template <class Copy, int kElements, int kBatch>
SHARDCOMM_HOST_DEVICE inline void copy_accesses(const Accesses& all, const typename Copy::Src* src,
                                                typename Copy::Dst* dst, float scale,
                                                std::uint32_t thread, std::uint32_t threads,
                                                typename Copy::Side& side) {
  using Read = Access<typename Copy::Src, kElements>;
  using Write = Access<typename Copy::Dst, kElements>;
  for (std::uint32_t first = thread; first < all.count(); first += kBatch * threads) {
    typename Read::Held from[kBatch];
    typename Write::Held to[kBatch];
    std::int64_t at[kBatch];
    // Past the end, the last access is read again and nothing is stored, so that loads have no
    // branches.
    for (int k = 0; k < kBatch; ++k) {
      const std::uint32_t index = first + static_cast<std::uint32_t>(k) * threads;
      const auto place = all.at(index < all.count() ? index : all.count() - 1);
      at[k] = place.dst;
      if constexpr (kReads<Copy>) from[k] = Read::load(src + place.src);
      if constexpr (Copy::kAccumulates) to[k] = Write::load(dst + place.dst);
    }
    // The loop runs backwards, so that the first use of a load stands behind a branch: nvcc issues
    // all loads before that. Forwards, it would wait for the first load before it issues the last.
    for (int k = kBatch - 1; k >= 0; --k) {
      if (k > 0 && first + static_cast<std::uint32_t>(k) * threads >= all.count()) continue;
      if constexpr (!kReads<Copy>) {
        to[k] = {};
      } else if constexpr (Copy::kMoves) {
        to[k] = from[k];
      } else {
        const auto read = Read::elements(from[k]);
        Elements<typename Copy::Dst, kElements> written;
        if constexpr (Copy::kAccumulates) written = Write::elements(to[k]);
        for (int i = 0; i < kElements; ++i) {
          written.at[i] = Copy::apply(read.at[i], written.at[i], scale);
          side.wrote(written.at[i]);
        }
        memcpy(&to[k], &written, sizeof(written));
      }
      Write::store(dst + at[k], to[k]);
    }
  }
}

// Copies one thread's share of one tile.
template <class Copy>
SHARDCOMM_HOST_DEVICE inline void copy_share(const Tile& tile, const typename Copy::Src* src,
                                             typename Copy::Dst* dst, float scale,
                                             std::uint32_t thread, std::uint32_t threads,
                                             typename Copy::Side& side) {
  using Src = typename Copy::Src;
  using Dst = typename Copy::Dst;
  constexpr int kElements = kVectorElements<Src, Dst>;

  // The side with the narrower type decides where vectors begin.
  const auto narrow = reinterpret_cast<std::uintptr_t>(
      sizeof(Src) < sizeof(Dst) ? static_cast<const void*>(src) : static_cast<const void*>(dst));
  VectorSpan span = vector_span(narrow, tile.cols, kVectorBytes / kElements, kVectorBytes);
  const bool is_regular =
      tile.rows == 1 ||
      (tile.dst_pitch * static_cast<std::int64_t>(sizeof(Dst)) % kVectorBytes == 0 &&
       tile.src_pitch * static_cast<std::int64_t>(sizeof(Src)) % kVectorBytes == 0);
  if (!is_regular || !is_vector_aligned(src + span.head) || !is_vector_aligned(dst + span.head)) {
    span = {tile.cols, 0, 0};
  }
  if (span.body > 0) {
    const auto per_row = static_cast<std::uint32_t>(span.body) / kElements;
    const Accesses vectors(tile, per_row, kElements, span.head, per_row, 0);
    copy_accesses<Copy, kElements, kBatchVectors>(vectors, src, dst, scale, thread, threads, side);
  }
  if (span.head + span.tail > 0) {
    const auto per_row = static_cast<std::uint32_t>(span.head + span.tail);
    const Accesses singles(tile, per_row, 1, 0, span.head, span.body);
    copy_accesses<Copy, 1, kBatchElements>(singles, src, dst, scale, thread, threads, side);
  }
}

// Does what thread `thread` of block `block` does in a launch with `blocks` blocks of `threads`
// threads. The `src` and `dst` of `tiles` are indices into `operands`.
template <class Copy, int kCapacity>
SHARDCOMM_HOST_DEVICE inline void copy_as_thread(const Tile* tiles, std::uint32_t num_tiles,
                                                 const Operands<kCapacity>& operands, float scale,
                                                 std::uint32_t block, std::uint32_t blocks,
                                                 std::uint32_t thread, std::uint32_t threads,
                                                 typename Copy::Side& side) {
  using Src = typename Copy::Src;
  using Dst = typename Copy::Dst;
  for (std::uint32_t t = block; t < num_tiles; t += blocks) {
    const Tile tile = tiles[t];
    const void* from = tile.src == Segment::kZeros ? nullptr : operands.at[tile.src];
    Dst* dst = static_cast<Dst*>(const_cast<void*>(operands.at[tile.dst])) + tile.dst_offset;
    if (from != nullptr) {
      const Src* src = static_cast<const Src*>(from) + tile.src_offset;
      copy_share<Copy>(tile, src, dst, scale, thread, threads, side);
    } else if constexpr (!Copy::kAccumulates) {
      Tile zeros = tile;
      zeros.src_pitch = tile.dst_pitch;
      Unwatched nothing;
      copy_share<Zeroed<Copy>>(zeros, dst, dst, scale, thread, threads, nothing);
    }
  }
}

}  // namespace shardcomm
