// How two elements combine, and what becomes of the result: the arithmetic of a reduction, on a CPU
// and on CUDA.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "copy/element.h"
#include "shardcomm/dtype.h"
#include "shardcomm/reduce.h"

namespace shardcomm {

// Sources that are combined at once. Their results then combine in pairs that stand for equally
// many, so that the order of a sum depends on the number of its sources alone.
constexpr int kQuad = 4;

template <class T>
using Accumulator = decltype(load(std::declval<T>()));

// Integers are added as unsigned ones, where overflow is defined: it wraps.
template <class T>
[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using Wrapping = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
  } else {
    return a + b;
  }
}

struct Sum {
  template <class T>
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static T combine(T a, T b) {
    return add(a, b);
  }
};

// NaN wins from either side: b != b holds only for NaN, and a NaN in `a` survives because every
// comparison with it is false.
struct Max {
  template <class T>
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static T combine(T a, T b) {
    const T larger = a < b ? b : a;
    return b != b ? b : larger;
  }
};

struct Min {
  template <class T>
  [[gnu::always_inline]] SHARDCOMM_HOST_DEVICE static T combine(T a, T b) {
    const T smaller = b < a ? b : a;
    return b != b ? b : smaller;
  }
};

// The next ones are for a CPU alone.
struct Product {
  template <class T>
  [[gnu::always_inline]] static T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using Wrapping = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
    } else {
      return a * b;
    }
  }
};

struct BitAnd {
  template <class T>
  [[gnu::always_inline]] static T combine(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct BitOr {
  template <class T>
  [[gnu::always_inline]] static T combine(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct BitXor {
  template <class T>
  [[gnu::always_inline]] static T combine(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// Stores scale * (reduced / divisor), plus what `to` held if `accumulate`. `mean` is 1 / divisor:
// floats multiply by it, integers divide and have no scale.
template <class Dst, class Value>
[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline void finish(Dst& to, Value reduced,
                                                                bool accumulate, int divisor,
                                                                Value mean, Value scale) {
  if constexpr (std::is_integral_v<Value>) {
    const Value value = divisor == 1 ? reduced : static_cast<Value>(reduced / divisor);
    store(to, accumulate ? add(to, value) : value);
  } else {
    const Value value = scale * (reduced * mean);
    store(to, accumulate ? load(to) + value : value);
  }
}

// Calls visit(T{}) with the C++ type of `dtype`.
template <class Visit>
void with_type(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::u8:
      return visit(std::uint8_t{});
    case DType::i32:
      return visit(std::int32_t{});
    case DType::i64:
      return visit(std::int64_t{});
    case DType::f16:
      return visit(Half{});
    case DType::bf16:
      return visit(BFloat16{});
    case DType::f32:
      return visit(float{});
    case DType::f64:
      return visit(double{});
    case DType::i8:
      return visit(std::int8_t{});
  }
}

// Calls visit(Op{}) with the operation that combines elements, if a GPU has it; an average's is a
// sum.
template <class Visit>
void with_operation(RedOp op, Visit visit) {
  switch (op) {
    case RedOp::sum:
    case RedOp::avg:
    case RedOp::exact_sum:  // of integers; ExactSum is for floats
    case RedOp::exact_avg:
      return visit(Sum{});
    case RedOp::max:
      return visit(Max{});
    case RedOp::min:
      return visit(Min{});
    case RedOp::prod:
    case RedOp::band:
    case RedOp::bor:
    case RedOp::bxor:
      return;
  }
}

// The same, if a CPU has it for elements of type T.
template <class T, class Visit>
void with_any_operation(RedOp op, Visit visit) {
  if (op == RedOp::prod) return visit(Product{});
  if constexpr (std::is_integral_v<T>) {
    if (op == RedOp::band) return visit(BitAnd{});
    if (op == RedOp::bor) return visit(BitOr{});
    if (op == RedOp::bxor) return visit(BitXor{});
  }
  with_operation(op, visit);
}

}  // namespace shardcomm
