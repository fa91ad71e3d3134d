// Parts as Python gives them: a number of elements for each rank, or a tuple of the ranks' numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "bindings/bindings.h"
#include "shardcomm/parts.h"

namespace pybind11::detail {

template <>
struct type_caster<shardcomm::Parts> {
  PYBIND11_TYPE_CASTER(shardcomm::Parts, const_name("int | tuple[int, ...]"));

  bool load(handle given, bool convert) {
    make_caster<std::int64_t> count;
    if (count.load(given, convert)) {
      value = shardcomm::Parts(cast_op<std::int64_t>(count));
      return true;
    }
    make_caster<std::vector<std::int64_t>> counts;
    if (!isinstance<tuple>(given) || !counts.load(given, convert)) return false;
    value = shardcomm::Parts(cast_op<std::vector<std::int64_t>&>(counts));
    return true;
  }
};

}  // namespace pybind11::detail
