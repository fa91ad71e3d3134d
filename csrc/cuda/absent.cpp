// Everything that needs CUDA, in a build without it.
#include "comm/local.h"
#include "copy/blocks_cuda.h"
#include "copy/copy_cuda.h"
#include "copy/reduce_cuda.h"
#include "shardcomm/cuda.h"
#include "shardcomm/error.h"
#include "shardcomm/nccl.h"
#include "shardcomm/stream.h"

namespace shardcomm {
namespace {

constexpr const char* kAbsent =
    "this build of shardcomm has no CUDA; for a GPU, install the CUDA toolkit (nvcc) and build it "
    "again, with SHARDCOMM_CUDA=on";

[[noreturn]] void refuse() { throw CudaError(kAbsent); }

}  // namespace

bool cuda_built() { return false; }

CudaStatus cuda_status() {
  CudaStatus status;
  status.reason = kAbsent;
  return status;
}

std::unique_ptr<Stream> make_cuda_stream(int) { refuse(); }
std::unique_ptr<Stream> borrow_cuda_stream(int, NativeStream) { refuse(); }

LocalPlace place_on_device(int, int) { refuse(); }

struct CudaCopy::DeviceLaunch {};
CudaCopy::CudaCopy(const CopyPlan&, int) { refuse(); }
CudaCopy::~CudaCopy() = default;
void CudaCopy::run(const void* const*, void* const*, const CopyOptions&, NativeStream) const {
  refuse();
}
void convert_cuda(void*, DType, const void*, DType, std::int64_t, NativeStream) { refuse(); }

void reduce_cuda(void*, const Epilogue&, const void* const*, int, DType, RedOp, int, std::int64_t,
                 NativeStream) {
  refuse();
}

void encode_cuda(const BlockFormat&, const std::vector<EncodedSegment>&, DType, void*, std::int64_t,
                 std::uint64_t, BlockStats*, NativeStream) {
  refuse();
}
void decode_cuda(const BlockFormat&, const void*, std::int64_t, const std::vector<DecodedSegment>&,
                 DType, NativeStream) {
  refuse();
}
void decode_sum_cuda(const BlockFormat&, const void*, int, void*, std::int64_t, const Epilogue&,
                     NativeStream) {
  refuse();
}

std::string nccl_unique_id() { refuse(); }
std::shared_ptr<Communicator> make_nccl(const std::string&, int, int, int, const NcclOptions&) {
  refuse();
}

}  // namespace shardcomm
