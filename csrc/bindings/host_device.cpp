#include "bindings/host_device.h"

namespace shardcomm::bindings {

const int kHostDevice = -1;

}  // namespace shardcomm::bindings
