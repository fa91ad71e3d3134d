#include "bindings/bindings.h"

namespace shardcomm::bindings {

void bind_stream(py::module_&) {}

}  // namespace shardcomm::bindings
