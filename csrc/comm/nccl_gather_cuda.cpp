// What sends the same to all, over NCCL: all_gather, broadcast and barrier.
#include <iterator>
#include <stdexcept>
#include <string>

#include "comm/buffer.h"
#include "comm/nccl_communicator.h"
#include "copy/copy_cuda.h"

namespace shardcomm {

std::shared_ptr<Registered> registered_at(const NcclChannel& channel, const void* data,
                                          std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  const auto after = channel.registered.upper_bound(first);
  if (after == channel.registered.begin()) return nullptr;
  const auto& [begin, memory] = *std::prev(after);
  const bool inside =
      bytes <= memory->bytes && static_cast<std::size_t>(first - begin) <= memory->bytes - bytes;
  return inside ? memory : nullptr;
}

void NcclCommunicator::run_all_gather(const void* send, DType send_dtype, void* recv,
                                      DType recv_dtype, const Parts& parts, std::int64_t tag,
                                      NativeStream native) {
  static constexpr Path kBroadcasts{
      "nccl", "broadcasts", "nccl: it gathers equal parts alone: a group of one broadcast a rank"};
  const std::int64_t count = parts.count(rank());
  const std::int64_t total = parts.total(size());
  const Path& path = parts.equal() ? kDirect : kBroadcasts;
  Call call;
  call.op = Op::all_gather;
  call.send_dtype = send_dtype;
  call.recv_dtype = recv_dtype;
  call.uneven = !parts.equal();
  call.count = call.uneven ? total : count;
  call.tag = tag;
  NcclChannel& channel = session_->gathers;
  if (total == 0) return skip(channel, call, path);
  run(channel, call, native, path, [&](NcclUse& use, cudaStream_t stream) {
    const void* part = send;
    // Also where nothing is converted: NCCL's fastest gathers want both sides in registered memory.
    // For uneven parts both must be. Else a broadcast's root alone has one that is not, and goes by
    // NCCL's own buffers (register/coll_reg.cc, ncclRegisterCollBuffers), while the next rank takes
    // the data for written into its `recv` already (device/prims_simple.h, genericOp).
    const auto known = [&](const void* data, std::int64_t n) {
      const auto memory = registered_at(channel, data, bytes_of(n, recv_dtype));
      return memory != nullptr && memory->known_to_nccl();
    };
    if (send_dtype != recv_dtype || (known(recv, total) && !known(send, count))) {
      void* own = at(recv, parts.begin(rank()), recv_dtype);
      convert_cuda(own, recv_dtype, send, send_dtype, count, stream);
      part = own;
    }
    if (parts.equal()) {
      use([&](nccl::Comm comm) {
        return nccl_.all_gather(part, recv, bytes_of(count, recv_dtype), nccl::kUint8, comm,
                                stream);
      });
      return;
    }
    use.group([&](const auto& note, nccl::Comm comm) {
      for (int root = 0; root < size(); ++root) {
        if (parts.count(root) == 0) continue;
        void* there = at(recv, parts.begin(root), recv_dtype);
        note(nccl_.broadcast(root == rank() ? part : there, there,
                             bytes_of(parts.count(root), recv_dtype), nccl::kUint8, root, comm,
                             stream));
      }
    });
  });
}

void NcclCommunicator::run_broadcast(void* buffer, DType dtype, std::int64_t count, int root,
                                     NativeStream native) {
  Call call;
  call.op = Op::broadcast;
  call.send_dtype = call.recv_dtype = dtype;
  call.root = root;
  call.count = count;
  if (count == 0) return skip(session_->gathers, call, kDirect);
  run(session_->gathers, call, native, kDirect, [&](NcclUse& use, cudaStream_t stream) {
    use([&](nccl::Comm comm) {
      return nccl_.broadcast(buffer, buffer, bytes_of(count, dtype), nccl::kUint8, root, comm,
                             stream);
    });
  });
}

void NcclCommunicator::run_barrier(std::int64_t tag, NativeStream native) {
  Call call;
  call.op = Op::barrier;
  call.tag = tag;
  run(session_->gathers, call, native, kDirect, [&](NcclUse& use, cudaStream_t stream) {
    void* zero = session_->gathers.words->data();
    use([&](nccl::Comm comm) {
      return nccl_.all_reduce(zero, zero, 1, nccl::kFloat32, nccl::kSum, comm, stream);
    });
  });
}

}  // namespace shardcomm
