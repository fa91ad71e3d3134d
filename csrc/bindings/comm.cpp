#include "bindings/bindings.h"

namespace shardcomm::bindings {

void bind_comm(py::module_&) {}

}  // namespace shardcomm::bindings
