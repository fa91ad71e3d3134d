// CopyPlan, its CPU and CUDA executors (the latter walked) and the reduction, for the sanitizers:
// every buffer has exactly the size it needs, so that an access out of bounds is seen. Expected
// values follow from how the buffers are filled.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "copy/bound_copy.h"
#include "copy/copy_bytes.h"
#include "copy/element.h"
#include "copy/launch.h"
#include "copy/simd.h"
#include "copy/thread_reduce.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/reduce.h"
#include "shardcomm/tile.h"

namespace {

using namespace shardcomm;

void require(bool condition, const char* claim) {
  if (condition) return;
  std::fprintf(stderr, "not true: %s (instruction set %s)\n", claim, name(instruction_set()));
  std::exit(1);
}

// Integers small enough to be exact in every type.
std::vector<float> integers(std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) - 125.0f;
  return values;
}

// Of every place in a line, on both sides; also so long that they go past the caches.
void long_copies_are_whole_and_touch_nothing_else() {
#if defined(__x86_64__)
  const bool by_vectors = instruction_set() != InstructionSet::baseline;
#else
  const bool by_vectors = false;
#endif
  std::mt19937 random(2);
  std::vector<std::size_t> lengths{kLongCopyBytes, kLongCopyBytes + 1, 4096, 70001};
  if (by_vectors) lengths.push_back((std::size_t{4} << 20) + 100);
  for (const std::size_t length : lengths) {
    std::vector<unsigned char> source(length + 64);
    for (unsigned char& byte : source) byte = static_cast<unsigned char>(random());
    for (std::size_t shift = 0; shift < 64; shift += length > 100000 ? 21 : 1) {
      const std::size_t from = random() % 64;
      std::vector<unsigned char> destination(length + 64, 7), wanted = destination;
      std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), length,
                  wanted.begin() + static_cast<std::ptrdiff_t>(shift));
      copy_bytes(&destination[shift], &source[from], length);
      require(destination == wanted, "a long copy is memcpy's");
#if defined(__x86_64__)
      if (!by_vectors) continue;
      std::fill(destination.begin(), destination.end(), static_cast<unsigned char>(7));
      copy_by_vectors(&destination[shift], &source[from], length);
      require(destination == wanted, "and so is one by vectors");
#endif
    }
  }
}

void rectangles_land_where_they_should() {
  std::mt19937 random(1);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const std::int64_t rows = draw(1, 6), cols = draw(1, round % 10 == 0 ? 40000 : 90);
    const std::int64_t src_pitch = cols + draw(0, 3), dst_pitch = cols + draw(0, 3);
    const std::int64_t src_offset = draw(0, 9), dst_offset = draw(0, 9);
    const CopyPlan plan({{0, 0, src_offset, src_pitch, dst_offset, dst_pitch, rows, cols}},
                        DType::f32, DType::bf16);
    const std::vector<float> source = integers(plan.src_extents()[0]);
    for (const bool by_kernel : {false, true}) {
      std::vector<BFloat16> destination(static_cast<std::size_t>(plan.dst_extents()[0]),
                                        BFloat16{0x7fc0});
      const void* sources[] = {source.data()};
      void* destinations[] = {destination.data()};
      if (by_kernel) {
        walk_launches(plan, sources, destinations, {2.0f, false}, 4096, kMostOperands, 2, 32);
      } else {
        copy_cpu(plan, sources, destinations, {2.0f, false});
      }
      std::int64_t untouched = 0;
      for (const BFloat16& element : destination) untouched += std::isnan(load(element));
      require(untouched == plan.dst_extents()[0] - rows * cols, "gaps are not touched");
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t col = 0; col < cols; ++col) {
          const auto at = static_cast<std::size_t>(src_offset + row * src_pitch + col);
          const auto to = static_cast<std::size_t>(dst_offset + row * dst_pitch + col);
          require(load(destination[to]) == 2.0f * source[at],
                  "an element is where its row and col say");
        }
      }
    }
  }
}

// Enough for several threads, and for stores past the caches.
void threads_and_streaming_copy_everything() {
  const std::int64_t count = 2'300'001;
  const std::vector<float> source = integers(count);
  for (int threads : {1, 2, 4}) {
    std::vector<float> destination(static_cast<std::size_t>(count) + 1, -1.0f);
    const auto plan = std::make_shared<CopyPlan>(
        std::vector<Segment>{{0, 0, 0, count, 1, count, 1, count}}, DType::f32, DType::f32);
    BoundCopy bound(plan, {source.data()}, {destination.data()}, threads);
    bound.run({}, nullptr);
    require(destination[0] == -1.0f, "what lies before the segment is not touched");
    require(std::vector<float>(destination.begin() + 1, destination.end()) == source,
            "a large copy copies everything");
    bound.set_operands({nullptr}, {destination.data()});
    bound.run({}, nullptr);
    require(std::vector<float>(destination.begin() + 1, destination.end()) ==
                std::vector<float>(source.size(), 0.0f),
            "a null source writes zeros");
  }
}

void halves_survive_the_way_to_float_and_back() {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<std::uint16_t>(bits)};
    const BFloat16 bfloat{static_cast<std::uint16_t>(bits)};
    Half half_back{};
    BFloat16 bfloat_back{};
    store(half_back, load(half));
    store(bfloat_back, load(bfloat));
    require(std::isnan(load(half)) ? std::isnan(load(half_back)) : half_back.bits == half.bits,
            "f16 -> f32 -> f16 changes nothing");
    require(
        std::isnan(load(bfloat)) ? std::isnan(load(bfloat_back)) : bfloat_back.bits == bfloat.bits,
        "bf16 -> f32 -> bf16 changes nothing");
  }
}

void reductions_add_up() {
  for (std::int64_t count : {0, 1, 127, 128, 129, 5003}) {
    const std::vector<float> source = integers(count);
    for (int num_sources : {1, 2, 5}) {
      const std::vector<const void*> sources(static_cast<std::size_t>(num_sources), source.data());
      std::vector<Half> sum(source.size(), Half{0x3c00});  // 1.0
      reduce_cpu(sum.data(), {DType::f16, 0.5f, true}, sources.data(), num_sources, DType::f32,
                 RedOp::sum, 1, count);
      std::vector<float> largest = source;
      const void* in_place[] = {largest.data(), source.data()};
      reduce_cpu(largest.data(), {}, in_place, 2, DType::f32, RedOp::max, 1, count);
      for (std::size_t i = 0; i < source.size(); ++i) {
        const float expected = 1.0f + 0.5f * static_cast<float>(num_sources) * source[i];
        require(load(sum[i]) == expected, "a sum is scaled, accumulated and converted");
        require(largest[i] == source[i], "the maximum of equal values is that value");
      }
    }
  }
  const std::vector<float> partial(7, 12.0f);  // of two ranks each
  std::vector<float> mean(partial.size());
  const void* partials[] = {partial.data(), partial.data()};
  reduce_cpu(mean.data(), {}, partials, 2, DType::f32, RedOp::avg, 4, 7);
  require(mean == std::vector<float>(7, 6.0f), "partial sums are divided by the number of ranks");
  const std::vector<std::int32_t> limit(100, std::numeric_limits<std::int32_t>::max());
  std::vector<std::int32_t> wrapped(100);
  const void* sources[] = {limit.data(), limit.data()};
  reduce_cpu(wrapped.data(), {DType::i32, 1.0f, false}, sources, 2, DType::i32, RedOp::sum, 1, 100);
  require(wrapped[99] == -2, "integers wrap");
}

// Products wrap, bits are those of the type, and i8 has a sign: of all pairs of bytes, and of
// larger integers that are made of them.
template <class T>
void integers_combine_bit_by_bit(DType dtype) {
  using Wide = std::make_unsigned_t<T>;
  const auto spread = [](std::size_t byte) {  // over all bytes of a T
    return static_cast<T>(static_cast<Wide>(byte * 0x9d3c5b7a1f2e4d69u) | static_cast<Wide>(byte));
  };
  std::vector<T> a, b;
  for (std::size_t i = 0; i < 65536; ++i) {
    a.push_back(spread(i & 255));
    b.push_back(spread(i >> 8));
  }
  const auto count = static_cast<std::int64_t>(a.size());
  const auto each = [&](RedOp op, const auto& wanted) {
    const void* sources[] = {a.data(), b.data(), b.data()};
    for (const int num_sources : {2, 3}) {
      std::vector<T> result(a.size());
      reduce_cpu(result.data(), {dtype}, sources, num_sources, dtype, op, num_sources, count);
      for (std::size_t i = 0; i < a.size(); ++i) {
        T want = wanted(a[i], b[i]);
        if (num_sources == 3) want = wanted(want, b[i]);
        if (op == RedOp::avg) want = static_cast<T>(want / num_sources);
        require(result[i] == want, name(op));
      }
    }
  };
  using Word = std::uint64_t;  // whose low bits are right, whatever overflows
  each(RedOp::prod, [](T x, T y) { return static_cast<T>(Word(x) * Word(y)); });
  each(RedOp::band, [](T x, T y) { return static_cast<T>(Word(x) & Word(y)); });
  each(RedOp::bor, [](T x, T y) { return static_cast<T>(Word(x) | Word(y)); });
  each(RedOp::bxor, [](T x, T y) { return static_cast<T>(Word(x) ^ Word(y)); });
  each(RedOp::sum, [](T x, T y) { return static_cast<T>(Word(x) + Word(y)); });
  each(RedOp::avg, [](T x, T y) { return static_cast<T>(Word(x) + Word(y)); });
  each(RedOp::max, [](T x, T y) { return std::max(x, y); });
  each(RedOp::min, [](T x, T y) { return std::min(x, y); });
}

// In 32 bits, rounded once: each partial product would be another in 16.
void products_of_halves_round_once() {
  const Half quarter{0x340e};  // about a quarter
  const std::vector<Half> quarters(300, quarter);
  const void* sources[] = {quarters.data(), quarters.data(), quarters.data()};
  std::vector<Half> cubes(quarters.size());
  reduce_cpu(cubes.data(), {DType::f16}, sources, 3, DType::f16, RedOp::prod, 1, 300);
  Half want{};
  store(want, load(quarter) * load(quarter) * load(quarter));
  require(cubes[0].bits == want.bits && cubes[299].bits == want.bits, "a product in 32 bits");
  Half square{}, rounded{};
  store(square, load(quarter) * load(quarter));
  store(rounded, load(square) * load(quarter));
  require(rounded.bits != want.bits, "which 16 bits would round to another number");
}

void a_device_refuses_what_it_has_no_kernel_for() {
  std::int32_t value = 3;
  const void* sources[] = {&value};
  const auto is_refused = [&](DType dtype, RedOp op) {
    try {
      walk_reduce(&value, {dtype}, sources, 1, dtype, op, 1, 1, 1);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what()).find("accepted on a CUDA device: sum") != std::string::npos;
    }
    return false;
  };
  for (const RedOp op : {RedOp::prod, RedOp::band, RedOp::bor, RedOp::bxor}) {
    require(is_refused(DType::i32, op), "no kernel for this operation");
  }
  require(is_refused(DType::i8, RedOp::sum), "no kernel for i8");
  require(!is_refused(DType::i32, RedOp::min) && value == 3, "a kernel for others");
}

// Of `count` elements, one is NaN or Inf, or none (-1).
void a_flag_tells_of_what_is_not_finite() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (std::int64_t count : {1, 31, 128, 129, 1000}) {
    for (std::int64_t at : {std::int64_t{-1}, std::int64_t{0}, count / 2, count - 1}) {
      std::vector<float> source = integers(count);
      if (at >= 0) source[static_cast<std::size_t>(at)] = at % 2 == 0 ? kInfinity : std::nanf("");
      const void* sources[] = {source.data()};
      for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        for (bool accumulate : {false, true}) {
          std::vector<float> result(source.size());  // room for any of them
          std::int32_t reduced = 0, copied = 0;
          reduce_cpu(result.data(), {dtype, 1.0f, accumulate, &reduced}, sources, 1, DType::f32,
                     RedOp::sum, 1, count);
          result.assign(source.size(), 0.0f);
          void* destinations[] = {result.data()};
          const CopyPlan plan({{0, 0, 0, count, 0, count, 1, count}}, DType::f32, dtype);
          copy_cpu(plan, sources, destinations, {1.0f, accumulate, &copied});
          require(reduced == (at >= 0) && copied == (at >= 0), "the flag is set if, and only if");
        }
      }
    }
  }
}

void spans_split_at_vector_boundaries() {
  const VectorSpan span = vector_span(/*address=*/60, /*count=*/100, /*item_bytes=*/4, 16);
  require(span.head == 1 && span.body == 96 && span.tail == 3, "one head, 24 vectors, 3 left over");
  const VectorSpan short_span = vector_span(4, 2, 4, 16);
  require(short_span.head == 2 && short_span.body == 0 && short_span.tail == 0,
          "a run that ends before the boundary is all head");
}

// The kernel multiplies where it would divide.
void accesses_are_where_a_division_says() {
  for (std::int64_t per_row = 1; per_row <= kMostTileElements / 2; per_row += 1 + per_row / 64) {
    const std::int64_t rows = kMostTileElements / per_row;
    const Accesses all({0, 0, 0, 100'000, 0, 1'000'000, rows, per_row},
                       static_cast<std::uint32_t>(per_row), 1, 0, per_row, 0);
    for (std::int64_t index = 0; index < rows * per_row; ++index) {
      const auto place = all.at(static_cast<std::uint32_t>(index));
      require(place.src == index / per_row * 100'000 + index % per_row &&
                  place.dst == index / per_row * 1'000'000 + index % per_row,
              "an access is in the row and column of its index");
    }
  }
}

// On a device of 132 processors, whose blocks have 256 threads, each with up to 4 vectors of 8.
void tiles_keep_threads_and_processors_busy() {
  const auto tile_of = [](std::int64_t elements) {
    const CopyPlan plan({{0, 0, 0, elements, 0, elements, 1, elements}}, DType::f32, DType::bf16);
    return tile_elements_for(plan, 132);
  };
  constexpr std::int64_t kVectorEach = 256 * 8;
  for (std::int64_t elements = 100; elements < 1'000'000'000; elements += 1 + elements / 3) {
    const std::int64_t tile = tile_of(elements);
    require(tile >= kVectorEach && tile <= 16 * kVectorEach, "every thread has 1 to 16 vectors");
    if (elements >= 132 * 4 * kVectorEach) {
      require(tile >= 4 * kVectorEach, "of a large plan every thread has a full batch");
    }
    if (elements >= 132 * kVectorEach) {
      require((elements + tile - 1) / tile >= 119, "nine of ten processors have a tile");
    }
  }
}

}  // namespace

int main() {
  halves_survive_the_way_to_float_and_back();
  spans_split_at_vector_boundaries();
  accesses_are_where_a_division_says();
  tiles_keep_threads_and_processors_busy();
  a_device_refuses_what_it_has_no_kernel_for();
  for (InstructionSet set : instruction_sets()) {
    use_instruction_set(set);
    long_copies_are_whole_and_touch_nothing_else();
    rectangles_land_where_they_should();
    threads_and_streaming_copy_everything();
    reductions_add_up();
    integers_combine_bit_by_bit<std::uint8_t>(DType::u8);
    integers_combine_bit_by_bit<std::int8_t>(DType::i8);
    integers_combine_bit_by_bit<std::int32_t>(DType::i32);
    integers_combine_bit_by_bit<std::int64_t>(DType::i64);
    products_of_halves_round_once();
    a_flag_tells_of_what_is_not_finite();
  }
  std::puts("copy_test: ok");
}
