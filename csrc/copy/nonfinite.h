// A side output of element operations: whether any element that they wrote is NaN or Inf.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "copy/element.h"

namespace shardcomm {

// The watch where nobody asked for one. It costs nothing.
struct Unwatched {
  template <class T>
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE void wrote(T) {}
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE bool nonfinite() const { return false; }
};

// Only NaN and Inf have exponents of all ones. With the sign cleared, adding one step of the
// exponent therefore carries into the sign's place for them alone. That takes three instructions an
// element and no branch, and becomes a vector loop on every instruction set.
template <class T, class Bits, Bits kExponentStep>
class ExponentWatch {
 public:
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE void wrote(T element) {
    Bits bits;
    std::memcpy(&bits, &element, sizeof bits);
    carries_ |= static_cast<Bits>((bits & static_cast<Bits>(~kSign)) + kExponentStep);
  }
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE bool nonfinite() const {
    return (carries_ & kSign) != 0;
  }

 private:
  static constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  Bits carries_ = 0;
};

namespace detail {

template <class T>
struct WatchOf {
  using Type = Unwatched;  // integers are always finite
};
template <>
struct WatchOf<Half> {
  using Type = ExponentWatch<Half, std::uint16_t, 1 << 10>;
};
template <>
struct WatchOf<BFloat16> {
  using Type = ExponentWatch<BFloat16, std::uint16_t, 1 << 7>;
};
template <>
struct WatchOf<float> {
  using Type = ExponentWatch<float, std::uint32_t, 1 << 23>;
};
template <>
struct WatchOf<double> {
  using Type = ExponentWatch<double, std::uint64_t, std::uint64_t{1} << 52>;
};

}  // namespace detail

// The watch for elements of type T.
template <class T>
using Watch = typename detail::WatchOf<T>::Type;

// Sets `flag`, if there is one, to 1 if `side` has seen NaN or Inf. Several threads may set the
// same flag at once, those of one copy and those of several. Relaxed: who reads the flag has waited
// for the copies, and that orders it.
template <class Side>
inline void report(const Side& side, std::int32_t* flag) {
  if (flag != nullptr && side.nonfinite()) __atomic_store_n(flag, 1, __ATOMIC_RELAXED);
}

#ifdef __CUDACC__
// Does what report() does, once for a block. All threads of the block call it with the same flag.
template <class Side>
__device__ inline void report_of_block(const Side& side, std::int32_t* flag) {
  if constexpr (!std::is_same_v<Side, Unwatched>) {
    if (flag == nullptr) return;
    if (__syncthreads_or(side.nonfinite()) && threadIdx.x == 0) atomicOr(flag, 1);
  }
}
#endif

}  // namespace shardcomm
