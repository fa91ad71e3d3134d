#include "copy/copy_bytes.h"

#include <cstdint>

#include "copy/simd.h"
#include "copy/streaming.h"
#include "shardcomm/tile.h"

namespace shardcomm {

#if defined(__x86_64__)
namespace {

constexpr int kVectorsAtOnce = 4;
constexpr std::int64_t kTurnBytes = kVectorsAtOnce * 32;

// `to` is aligned to a line, and `bytes` is a multiple of kTurnBytes. All loads of a turn come
// before its stores: a load behind a store with the same place in its page would wait for it.
[[gnu::target("avx2")]] void copy_turns(std::byte* to, const std::byte* from, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += kTurnBytes) {
    __m256i held[kVectorsAtOnce];
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      held[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i) + v);
    }
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + i) + v, held[v]);
    }
  }
}

}  // namespace

void copy_by_vectors(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const auto count = static_cast<std::int64_t>(bytes);
  if (count >= kStreamingRunBytes) return copy_past_caches(dst, src, bytes);
  const VectorSpan span = vector_span(reinterpret_cast<std::uintptr_t>(to), count, 1, kLineBytes);
  const std::int64_t body = span.body / kTurnBytes * kTurnBytes;
  std::memcpy(to, from, static_cast<std::size_t>(span.head));
  to += span.head;
  from += span.head;
  copy_turns(to, from, body);
  std::memcpy(to + body, from + body, static_cast<std::size_t>(count - span.head - body));
}
#endif

void copy_past_caches(void* dst, const void* src, std::size_t bytes) {
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const auto count = static_cast<std::int64_t>(bytes);
  const VectorSpan span = vector_span(reinterpret_cast<std::uintptr_t>(to), count, 1, kLineBytes);
  std::memcpy(to, from, static_cast<std::size_t>(span.head));
  copy_streaming(to + span.head, from + span.head, span.body);
  streaming_fence();
  const std::int64_t before = span.head + span.body;
  std::memcpy(to + before, from + before, static_cast<std::size_t>(span.tail));
}

void copy_long(void* dst, const void* src, std::size_t bytes) {
#if defined(__x86_64__)
  static const bool is_amd = __builtin_cpu_is("amd") != 0;
  if (is_amd && instruction_set() != InstructionSet::baseline) {
    return copy_by_vectors(dst, src, bytes);
  }
#endif
  std::memcpy(dst, src, bytes);
}

}  // namespace shardcomm
