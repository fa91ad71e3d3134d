// What of an NCCL communicator may outlive it: its memory and its watchdog's thread still use it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "comm/nccl_channel.h"
#include "comm/nccl_watchdog.h"
#include "cuda/runtime.h"
#include "shardcomm/communicator.h"

namespace shardcomm {

struct NcclSession {
  NcclSession(const nccl::Library& nccl, int rank, int size, int device, double deadline_s);

  NcclRank rank;
  NcclChannel gathers{rank};
  NcclChannel reduces{rank};
  NcclWatchdog watchdog{rank, gathers, reduces};

  NcclChannel& channel(Use use) { return use == Use::gather ? gathers : reduces; }
  // A word of device memory that is zero outside of `agree`, which uses another.
  void* word(const NcclChannel& channel) const;

  // Collective; set-up only, as the host waits. Whether `mine` is true on every rank; all that is
  // on the set-up stream of every rank is then done. Throws CommError.
  bool agree(NcclChannel& channel, const Call& call, bool mine);
  cudaStream_t set_up(const NcclChannel& channel) const;

  // Both channels, from an id that all ranks have, or from somebody else's communicator.
  void connect(const std::string& unique_id);
  void split(nccl::Comm borrowed);
  // Leaves both in order, when nothing is left to do: false when another rank does not let it, and
  // then they are as before.
  bool finalize() noexcept;

 private:
  void wait(const Event& event, const Call& call);

  DeviceMemory words_;
  std::unique_ptr<Stream> streams_[2];
};

}  // namespace shardcomm
