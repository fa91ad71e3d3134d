#include "bindings/bindings.h"

namespace shardcomm::bindings {

void bind_copy(py::module_&) {}

}  // namespace shardcomm::bindings
