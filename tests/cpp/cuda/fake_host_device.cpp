// CPU tensors are those of a fake device.
#include "bindings/host_device.h"

namespace shardcomm::bindings {

const int kHostDevice = 0;

}  // namespace shardcomm::bindings
