// A stream that a caller may leave out. As a pointer, None would cost half a microsecond: pybind11
// asks what is no stream of ours whether another extension has wrapped one, by name, twice.
#pragma once

#include <optional>

#include "bindings/bindings.h"
#include "shardcomm/stream.h"

namespace shardcomm::bindings {

using OptionalStream = std::optional<Stream*>;

}  // namespace shardcomm::bindings
