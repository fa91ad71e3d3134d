// Whether this build and this machine have CUDA. The runtime is linked statically, and asks for the
// driver only at its first use, so that a build with CUDA runs on machines without it.
#pragma once

#include <string>

namespace shardcomm {

bool cuda_built();  // whether this build has the kernels; it asks no driver

struct CudaStatus {
  bool built = false;
  bool available = false;  // it is built, and this machine has a device
  std::string reason;      // why it is not available
  int devices = 0;
  int runtime_version = 0;  // as CUDA counts: 13000 is 13.0; 0: none
  int driver_version = 0;   // the newest runtime that the driver serves
};

CudaStatus cuda_status();

}  // namespace shardcomm
