// Block formats, by the CPU and by the CUDA kernels' code walked, for the sanitizers: every buffer
// has exactly the size it needs, so that an access out of bounds is seen.
#include "shardcomm/blocks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <vector>

#include "copy/philox.h"
#include "copy/simd.h"
#include "copy/thread_blocks.h"

namespace {

using namespace shardcomm;

void require(bool condition, const char* claim) {
  if (condition) return;
  std::fprintf(stderr, "not true: %s (instruction set %s)\n", claim, name(instruction_set()));
  std::exit(1);
}

// Exactly as many bytes as asked for, aligned as communication memory is.
class Wire {
 public:
  explicit Wire(std::int64_t bytes)
      : bytes_(bytes),
        at_(static_cast<std::uint8_t*>(
            ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{kWireAlignBytes}))) {
    std::memset(at_, 0xff, static_cast<std::size_t>(bytes));
  }
  ~Wire() { ::operator delete(at_, std::align_val_t{kWireAlignBytes}); }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  std::uint8_t* data() const { return at_; }
  std::int64_t bytes() const { return bytes_; }
  bool operator==(const Wire& other) const {
    return std::equal(at_, at_ + bytes_, other.at_, other.at_ + other.bytes_);
  }

 private:
  std::int64_t bytes_;
  std::uint8_t* at_;
};

// The known answers that Random123 is published with.
void philox_draws_the_published_words() {
  const PhiloxWords words = philox(0, 0);
  const std::uint32_t published[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  require(std::equal(words.at, words.at + 4, published), "Philox4x32-10 of zeros");
}

void elements_come_back_within_the_bound_and_where_they_were() {
  std::mt19937 random(3);
  std::uniform_int_distribution<std::uint32_t> any_bits;
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int round = 0; round < 240; ++round) {
    const BlockFormat format{round % 2 == 0 ? BlockCode::mxint8 : BlockCode::mxfp8,
                             32 << (round / 2 % 3),
                             round % 4 < 2 ? Rounding::nearest : Rounding::stochastic};
    std::vector<std::vector<float>> sources;
    std::vector<EncodedSegment> encoded;
    std::int64_t first = 0;
    for (std::int64_t i = draw(1, 5); i > 0; --i) {
      std::vector<float> source(static_cast<std::size_t>(draw(0, 300)));
      for (float& x : source) x = float_of_bits(any_bits(random) & 0xbfffffffu);  // finite
      first += draw(0, 2);
      encoded.push_back({source.data(), static_cast<std::int64_t>(source.size()), first});
      first += divide_up(static_cast<std::int64_t>(source.size()), format.block);
      sources.push_back(std::move(source));
    }
    const std::int64_t bytes = wire_bytes(format, first * format.block);
    const Wire wire(bytes), walked(bytes);
    BlockStats stats, walked_stats;
    encode_cpu(format, encoded, DType::f32, wire.data(), bytes, 7, &stats);
    walk_encode(format, encoded, DType::f32, walked.data(), bytes, 7, &walked_stats, 3, 2);
    require(wire == walked, "the kernel's code writes what the CPU writes");
    require(std::memcmp(&stats, &walked_stats, sizeof stats) == 0, "and sees what the CPU sees");
    require(stats.seen_bits <= stats.bound_bits, "nothing differs by more than the bound");

    for (std::size_t i = 0; i < sources.size(); ++i) {
      const std::vector<float>& source = sources[i];
      std::vector<float> back(source.size()), walked_back(source.size());
      const auto count = static_cast<std::int64_t>(source.size());
      const std::int64_t at = encoded[i].first_block;
      decode_cpu(format, wire.data(), bytes, {{back.data(), count, at}}, DType::f32);
      walk_decode(format, wire.data(), bytes, {{walked_back.data(), count, at}}, DType::f32, 2, 1);
      for (std::size_t k = 0; k < source.size(); ++k) {
        require(float_bits(std::fabs(back[k] - source[k])) <= stats.bound_bits,
                "an element is where it was");
        require(float_bits(back[k]) == float_bits(walked_back[k]), "the kernel's code decodes it");
      }
    }
  }
}

// Enough for several threads, and for stores past the caches.
void large_parts_are_summed_by_threads() {
  const BlockFormat format;
  const std::int64_t count = 2'100'007;
  std::vector<float> source(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>(i % 251) - 125.0f;
  const std::int64_t bytes = wire_bytes(format, count);
  const Wire wires(3 * bytes);
  BlockStats stats;
  for (int part = 0; part < 3; ++part) {
    encode_cpu(format, {{source.data(), count, 0}}, DType::f32, wires.data() + part * bytes, bytes,
               0, &stats, 4);
  }
  require(stats.flagged == 0 && stats.seen_bits <= stats.bound_bits, "all threads report");
  std::vector<BFloat16> sum(source.size()), walked(source.size());
  std::int32_t nonfinite = 0;
  const Epilogue epilogue{DType::bf16, 0.5f, false, &nonfinite};
  decode_sum_cpu(format, wires.data(), 3, sum.data(), count, epilogue, 4);
  walk_decode_sum(format, wires.data(), 3, walked.data(), count, epilogue, 5);
  require(std::memcmp(sum.data(), walked.data(), sum.size() * sizeof sum[0]) == 0,
          "the kernel's code sums as the CPU does");
  for (std::size_t i = 0; i < source.size(); ++i) {
    require(std::fabs(load(sum[i]) - 1.5f * source[i]) <= 2.0f, "a sum of three parts, halved");
  }
  require(nonfinite == 0, "nothing is NaN");
}

void wrong_arguments_are_refused() {
  Wire wire(128);
  const auto refuses = [](auto call) {
    try {
      call();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  require(refuses([] { wire_bytes({BlockCode::mxint8, 33}, 1); }), "blocks of 33 are refused");
  require(refuses([&] { encode_cpu({}, {}, DType::f64, wire.data(), 128, 0, nullptr); }),
          "f64 is refused");
  require(refuses([&] { encode_cpu({}, {}, DType::f32, wire.data() + 1, 0, 0, nullptr); }),
          "a wire that is not aligned is refused");
  require(refuses([&] { decode_cpu({}, wire.data(), 128, {{nullptr, 97, 0}}, DType::f32); }),
          "a segment outside the wire is refused");
  require(refuses([&] {
            decode_cpu({}, wire.data(), 128, {{nullptr, INT64_MAX, INT64_MAX}}, DType::f32);
          }),
          "numbers that would overflow are refused");
}

}  // namespace

int main() {
  philox_draws_the_published_words();
  for (InstructionSet set : instruction_sets()) {
    use_instruction_set(set);
    elements_come_back_within_the_bound_and_where_they_were();
    large_parts_are_summed_by_threads();
  }
  wrong_arguments_are_refused();
}
