// `nccl`: ranks with a CUDA device each, of one or many hosts. NCCL is loaded when first asked for;
// no NCCL is needed to build.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shardcomm/communicator.h"

namespace shardcomm {

struct NcclStatus {
  bool available = false;
  std::string path;                  // of the library
  int version = 0;                   // as NCCL counts: 22703 is 2.27.3
  std::string reason;                // why not, if not
  std::vector<std::string> missing;  // what it is too old for: "ncclCommWindowRegister (2.27)"
};

// Loads NCCL, once for the process: the copy that is already in the process (torch's), else the
// first of `paths` that can be used, else the system's. While none was found, it looks again.
NcclStatus nccl_status(const std::vector<std::string>& paths = {});

// What NCCL may take of the GPU for a collective (NCCL_CTA_POLICY_*). With `zero`, copy engines do
// the gathers into communication memory of ranks that share a host, and no SM does (but for a cast
// of the shard); it needs NCCL 2.28, `efficiency` 2.27.
enum class CtaPolicy : std::uint8_t { standard, efficiency, zero };

struct NcclOptions {
  double deadline_s = 300.0;  // longest wait for another rank inside one collective
  CtaPolicy cta_policy = CtaPolicy::standard;
  std::string host;  // ranks of one name share a host; empty: NCCL_HOSTID, or this machine's own
};

// 256 bytes that rank 0 makes and sends to the others by any means; each names one group. They are
// the unique ids of two NCCL communicators. Throws CudaError when there is no NCCL or no device.
std::string nccl_unique_id();

// Collective: returns when all ranks have connected. Throws CommError when they have not within the
// deadline, CudaError as nccl_unique_id does, std::invalid_argument for an option that this NCCL
// does not have.
//
// On two communicators of its own, so that gathers and reduces overlap. Collectives are put on the
// stream and watched from a thread: one whose turn has come on its stream, and that does not end
// within the deadline, aborts both; its kernels then end, and every later call throws CommError. So
// does a call that waits on the host for the others to connect. What another rank called is not
// compared: NCCL leaves a mismatch to the deadline, or to the data.
//
// The first collective of a kind waits on the host, so there a thread must call gathers and reduces
// in one order on all ranks. `abort` and `close` end this rank's part; the others learn it at their
// deadline. A replayed graph has no deadline: bound the wait for it, and call abort, which ends it.
// Destroy a graph before the communicator, which NCCL cannot end before it.
//
// reduce_scatter sums 16-bit floats in 32 bits: the ranks of a host exchange their slices, and sum
// them; from each host one partial sum a rank, rounded to 16 bits, goes to the others, which sum
// those. all_reduce leaves them to NCCL.
std::shared_ptr<Communicator> make_nccl(const std::string& unique_id, int rank, int size,
                                        int device, const NcclOptions& options = {});

}  // namespace shardcomm
