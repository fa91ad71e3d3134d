// The `nccl` transport: ranks with a CUDA device each, on one or many hosts. NCCL is loaded when it
// is first asked for. No NCCL is needed to build.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shardcomm/communicator.h"

namespace shardcomm {

struct NcclStatus {
  bool available = false;
  std::string path;                  // the path of the library
  int version = 0;                   // as NCCL counts: 22703 is 2.27.3
  std::string reason;                // why it is not available
  std::vector<std::string> missing;  // what it is too old for: "ncclCommWindowRegister (2.27)"
};

// Loads NCCL, once for the process: the copy that is already in the process (torch's), else the
// first of `paths` that can be used, else the system's. As long as none was found, each call looks
// again.
NcclStatus nccl_status(const std::vector<std::string>& paths = {});

// How much of the GPU NCCL may take for a collective (NCCL_CTA_POLICY_*). With `zero`, copy engines
// do the gathers into communication memory among ranks that share a host, and SMs only cast the
// shard. `zero` needs NCCL 2.28, and `efficiency` 2.27.
enum class CtaPolicy : std::uint8_t { standard, efficiency, zero };

struct NcclOptions {
  double deadline_s = 300.0;  // longest wait for another rank inside one collective, in seconds
  CtaPolicy cta_policy = CtaPolicy::standard;
  // Ranks with the same name share a host. Empty: NCCL_HOSTID, or this machine's own name.
  std::string host;
};

// Makes 256 bytes that name one group: the unique ids of two NCCL communicators. Rank 0 calls it,
// and sends them to the other ranks by any means. Throws CudaError if there is no NCCL or no
// device.
std::string nccl_unique_id();

// Connects a rank. Collective: it returns when all ranks have connected. Throws CommError if they
// have not within the deadline, CudaError as nccl_unique_id does, and std::invalid_argument for an
// option that this NCCL does not have.
//
// It uses two NCCL communicators of its own, so that gathers and reduces overlap. Collectives are
// put on the stream, and a thread watches them. If the turn of a collective has come on its stream
// and it does not end within the deadline, the thread aborts both communicators. Every later call
// throws CommError, and so does a call that waits on the host for other ranks to connect. The
// kernels end. NCCL cannot end symmetric kernels before 2.29.7, nor gathers by copy engines, which
// wait for ever for a rank that has died: if such a collective is still on the GPU after another
// deadline, the thread writes a sentence to stderr and ends the process by SIGABRT. Ranks do not
// compare what they call: NCCL leaves a mismatch to the deadline, or to the data.
//
// The first collective of a kind waits on the host. So a thread must call the first gathers and
// reduces in one order on all ranks. `abort` and `close` end this rank's part; the other ranks
// notice that at their deadline. A replayed graph has no deadline: bound the wait for it, and call
// abort. If the graph goes on, by symmetric kernels or copy engines, end the process. Destroy a
// graph before the communicator, which NCCL cannot end earlier.
//
// reduce_scatter sums 16-bit floats in 32 bits. First the ranks of a host exchange their slices,
// and sum them. Then the ranks with the same index on their hosts exchange these partial sums,
// rounded to 16 bits, and sum those. all_reduce leaves the sum to NCCL.
std::shared_ptr<Communicator> make_nccl(const std::string& unique_id, int rank, int size,
                                        int device, const NcclOptions& options = {});

}  // namespace shardcomm
