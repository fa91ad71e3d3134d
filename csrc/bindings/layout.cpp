#include "bindings/bindings.h"

namespace shardcomm::bindings {

void bind_layout(py::module_&) {}

}  // namespace shardcomm::bindings
