// The only source that differs between versions.
#include "fake_nccl/profile.h"

const int fake_nccl::kVersion = FAKE_NCCL_VERSION;
