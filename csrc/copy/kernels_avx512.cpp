#if defined(__x86_64__)
#define SHARDCOMM_KERNELS kAvx512Kernels
#include "copy/kernels_impl.h"
#endif
