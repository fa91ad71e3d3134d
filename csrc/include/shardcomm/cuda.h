// What this build and this machine have of CUDA. The runtime is linked statically and asks for the
// driver only when first used, so a build with CUDA runs on machines without it.
#pragma once

#include <string>

namespace shardcomm {

bool cuda_built();  // this build has the kernels; asks no driver

struct CudaStatus {
  bool built = false;
  bool available = false;  // built, and this machine has a device
  std::string reason;      // why not, if not
  int devices = 0;
  int runtime_version = 0;  // as CUDA counts: 13000 is 13.0; 0: none
  int driver_version = 0;   // the newest runtime that the driver serves
};

CudaStatus cuda_status();

}  // namespace shardcomm
