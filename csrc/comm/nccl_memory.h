// Communication memory on a device, registered with NCCL as far as it can.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "comm/nccl_session.h"

namespace shardcomm {

struct NcclAllocation {
  std::shared_ptr<Memory> memory;
  // "window": on every rank at the same place, NCCL's kernels reach it directly. "buffer": NCCL
  // copies from and to it without a stage between. "plain": memory of the device.
  const char* taken;
  std::string reason;
};

// Collective. Throws CommError, on all ranks, when one has not so much memory.
NcclAllocation allocate_nccl(const std::shared_ptr<NcclSession>& session, NcclChannel& channel,
                             const Call& call, std::size_t bytes);

}  // namespace shardcomm
