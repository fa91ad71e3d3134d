#include "copy/round_cpu.h"

#include <algorithm>

#include "copy/convert_cpu.h"
#include "copy/simd.h"

namespace shardcomm {
namespace {

// What is rounded is measured while it is in the nearest cache.
constexpr std::int64_t kPieceElements = 2048;

// Raises `most` and `seen` to the largest of |from| and of |from - to|, as bits, which vectors
// compare; what is not finite counts apart.
struct Measure {
  [[gnu::always_inline]] static void run(const float* from, const BFloat16* to, std::int64_t count,
                                         std::uint32_t* most, std::uint32_t* seen,
                                         std::int32_t* flagged) {
    auto largest = static_cast<std::int32_t>(*most), difference = static_cast<std::int32_t>(*seen);
    std::int32_t others = *flagged;
    for (std::int64_t i = 0; i < count; ++i) {
      // 1 if it is no finite bf16: the exponent is all ones, and carries. A branch would keep the
      // compiler from vectors.
      const std::int32_t other = ((to[i].bits & 0x7f80) + 0x80) >> 15;
      const std::int32_t kept = (other - 1) & 0x7fffffff;
      const auto value = static_cast<std::int32_t>(float_bits(from[i])) & kept;
      const auto lost = static_cast<std::int32_t>(float_bits(from[i] - load(to[i]))) & kept;
      largest = value > largest ? value : largest;
      difference = lost > difference ? lost : difference;
      others += other;
    }
    *most = static_cast<std::uint32_t>(largest);
    *seen = static_cast<std::uint32_t>(difference);
    *flagged = others;
  }
};

}  // namespace

void round_to_bf16(const float* from, BFloat16* to, std::int64_t count, BlockStats* stats) {
  if (stats == nullptr) return convert_cpu(to, DType::bf16, from, DType::f32, count);
  const auto measure = best_of<Measure>();
  std::uint32_t most = 0, seen = 0;
  std::int32_t flagged = 0;
  for (std::int64_t done = 0; done < count; done += kPieceElements) {
    const std::int64_t n = std::min(kPieceElements, count - done);
    convert_cpu(to + done, DType::bf16, from + done, DType::f32, n);
    measure(from + done, to + done, n, &most, &seen, &flagged);
  }
  const float bound = most == 0 ? 0.0f : std::max(float_of_bits(most) * 0x1p-8f, 0x1p-134f);
  stats->bound_bits = std::max(stats->bound_bits, float_bits(bound));
  stats->seen_bits = std::max(stats->seen_bits, seen);
  stats->flagged += flagged;
}

}  // namespace shardcomm
