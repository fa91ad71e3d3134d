// The device of CPU tensors.
#pragma once

namespace shardcomm::bindings {

// The CUDA device that the host's memory counts as: none (-1), or a device of a played CUDA runtime
// where the build has one. With a played runtime, what runs on GPUs runs on CPU tensors.
extern const int kHostDevice;

}  // namespace shardcomm::bindings
