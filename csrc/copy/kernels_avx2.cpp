#if defined(__x86_64__)
#define SHARDCOMM_KERNELS kAvx2Kernels
#include "copy/kernels_impl.h"
#endif
