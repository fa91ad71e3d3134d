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

// 128 bytes that rank 0 makes and sends to the others by any means; each names one group. Throws
// CudaError when there is no NCCL or no device.
std::string nccl_unique_id();

// Collective: returns when all ranks have connected. Throws CommError when they have not within the
// deadline, CudaError as nccl_unique_id does.
//
// On two communicators of its own, so that gathers and reduces overlap. Collectives are put on the
// stream and watched from a thread: one whose turn has come on its stream, and that does not end
// within the deadline, aborts both; its kernels then end, and every later call throws CommError.
// What another rank called is not compared: NCCL leaves a mismatch to the deadline, or to the data.
std::shared_ptr<Communicator> make_nccl(const std::string& unique_id, int rank, int size,
                                        int device, const CommOptions& options = {});

// The ranks of somebody else's ncclComm_t, of the NCCL that nccl_status names. Collective: it is
// split twice, and must be idle meanwhile; it stays its owner's, and may be destroyed afterwards.
std::shared_ptr<Communicator> borrow_nccl(std::uintptr_t comm, int device,
                                          const CommOptions& options = {});

}  // namespace shardcomm
