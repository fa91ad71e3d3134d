// What the `nccl` transport leaves to NCCL: all_to_all, gather, scatter and reduce.
#include <stdexcept>
#include <string>

#include "comm/nccl_communicator.h"

namespace shardcomm {
namespace {

[[noreturn]] void refuse(const char* operation, const char* instead) {
  throw std::invalid_argument(std::string(operation) + ": the nccl transport has none; call " +
                              instead);
}

}  // namespace

void NcclCommunicator::run_all_to_all(const void*, const Parts&, void*, const Parts&, DType,
                                      std::int64_t, NativeStream) {
  refuse("all_to_all",
         "ncclSend and ncclRecv for each rank between ncclGroupStart and ncclGroupEnd");
}

void NcclCommunicator::run_gather(const void*, void*, DType, std::int64_t, int, std::int64_t,
                                  NativeStream) {
  refuse("gather", "all_gather, or ncclSend and ncclRecv");
}

void NcclCommunicator::run_scatter(const void*, void*, DType, std::int64_t, int, std::int64_t,
                                   NativeStream) {
  refuse("scatter", "broadcast, or ncclSend and ncclRecv");
}

void NcclCommunicator::run_reduce(const void*, void*, DType, std::int64_t, RedOp, int, std::int64_t,
                                  NativeStream) {
  refuse("reduce", "all_reduce, or ncclReduce");
}

}  // namespace shardcomm
