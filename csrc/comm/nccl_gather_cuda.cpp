// What sends the same to all, over NCCL: all_gather, broadcast and barrier.
#include <stdexcept>
#include <string>

#include "comm/buffer.h"
#include "comm/nccl_communicator.h"
#include "copy/copy_cuda.h"

namespace shardcomm {

void NcclCommunicator::all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                                  std::int64_t count, std::int64_t tag, NativeStream native) {
  check_buffer("all_gather", "send", send, count);
  check_buffer("all_gather", "recv", recv, count);
  check_conversion("all_gather", send_dtype, recv_dtype);
  Call call;
  call.op = Op::all_gather;
  call.send_dtype = send_dtype;
  call.recv_dtype = recv_dtype;
  call.count = count;
  call.tag = tag;
  if (count == 0) return skip(session_->gathers, call, kDirect);
  run(session_->gathers, call, native, kDirect, [&](cudaStream_t stream) {
    const void* part = send;
    if (send_dtype != recv_dtype) {
      void* own = at(recv, rank_.rank * count, recv_dtype);
      convert_cuda(own, recv_dtype, send, send_dtype, count, stream);
      part = own;
    }
    session_->gathers.call(call, [&](nccl::Comm comm) {
      return nccl_.all_gather(part, recv, bytes_of(count, recv_dtype), nccl::kUint8, comm, stream);
    });
  });
}

void NcclCommunicator::broadcast(void* buffer, std::size_t bytes, int root, NativeStream native) {
  check_buffer("broadcast", "buffer", buffer, static_cast<std::int64_t>(bytes));
  if (root < 0 || root >= rank_.size) {
    throw std::invalid_argument("broadcast: root is " + std::to_string(root) +
                                "; it must be a rank, 0 to " + std::to_string(rank_.size - 1));
  }
  Call call;
  call.op = Op::broadcast;
  call.root = root;
  call.count = static_cast<std::int64_t>(bytes);
  if (bytes == 0) return skip(session_->gathers, call, kDirect);
  run(session_->gathers, call, native, kDirect, [&](cudaStream_t stream) {
    session_->gathers.call(call, [&](nccl::Comm comm) {
      return nccl_.broadcast(buffer, buffer, bytes, nccl::kUint8, root, comm, stream);
    });
  });
}

void NcclCommunicator::barrier(std::int64_t tag, NativeStream native) {
  Call call;
  call.op = Op::barrier;
  call.tag = tag;
  run(session_->gathers, call, native, kDirect, [&](cudaStream_t stream) {
    void* word = session_->word(session_->gathers);
    session_->gathers.call(call, [&](nccl::Comm comm) {
      return nccl_.all_reduce(word, word, 1, nccl::kFloat32, nccl::kSum, comm, stream);
    });
  });
}

}  // namespace shardcomm
