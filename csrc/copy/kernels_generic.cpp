#define SHARDCOMM_KERNELS kGenericKernels
#include "copy/kernels_impl.h"
