// What all transports do first: they check what a collective is called with.
#include "shardcomm/communicator.h"

#include <stdexcept>
#include <utility>

#include "comm/buffer.h"

namespace shardcomm {
namespace {

void check_broadcast(const void* buffer, DType dtype, std::int64_t count, int root, int size) {
  check_buffer("broadcast", "buffer", buffer, count, dtype);
  if (root >= 0 && root < size) return;
  throw std::invalid_argument("broadcast: root is " + std::to_string(root) +
                              "; it must be a rank, 0 to " + std::to_string(size - 1));
}

void check_coded(const Communicator& comm, DType dtype) {
  if (!comm.codes_reduces()) {
    throw std::invalid_argument("transport '" + comm.transport() +
                                "' has no partial sums that cross between hosts; leave the format "
                                "of reduces out, or use transport 'hosts'");
  }
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) {
    throw std::invalid_argument(std::string("reduce_scatter: dtype is ") + name(dtype) +
                                ", and partial sums are coded; accepted: f32, bf16 and f16");
  }
}

}  // namespace

void Communicator::run_coded_reduce_scatter(const void*, DType dtype, void*, const Epilogue&,
                                            const Parts&, RedOp, std::int64_t, const Coding&) {
  check_coded(*this, dtype);
}

Sharers Communicator::sharers(const void*, std::size_t) const { return {}; }

// A rank that shares memory with no other has nobody to wait for.
void Communicator::run_sharing(const void*, std::size_t, std::int64_t) {}

Mailbox& Communicator::mailbox() {
  throw std::invalid_argument("transport '" + transport() +
                              "' has no messages between two ranks; " +
                              "call ncclSend and ncclRecv on a communicator of your own");
}

void Communicator::all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                              const Parts& parts, std::int64_t tag, NativeStream stream) {
  check_all_gather(send, send_dtype, recv, recv_dtype, parts, rank(), size());
  run_all_gather(send, send_dtype, recv, recv_dtype, parts, tag, stream);
}

Stream::Operation Communicator::bind_all_gather(std::shared_ptr<Communicator> comm,
                                                const void* send, DType send_dtype, void* recv,
                                                DType recv_dtype, const Parts& parts,
                                                std::int64_t tag) {
  check_all_gather(send, send_dtype, recv, recv_dtype, parts, comm->rank(), comm->size());
  return [=, comm = std::move(comm)](NativeStream stream) {
    comm->run_all_gather(send, send_dtype, recv, recv_dtype, parts, tag, stream);
  };
}

void Communicator::reduce_scatter(const void* send, DType dtype, void* recv,
                                  const Epilogue& epilogue, const Parts& parts, RedOp op,
                                  std::int64_t tag, NativeStream stream) {
  check_reduce_scatter(send, dtype, recv, epilogue, parts, op, rank(), size());
  run_reduce_scatter(send, dtype, recv, epilogue, parts, op, tag, stream);
}

Stream::Operation Communicator::bind_reduce_scatter(std::shared_ptr<Communicator> comm,
                                                    const void* send, DType dtype, void* recv,
                                                    const Epilogue& epilogue, const Parts& parts,
                                                    RedOp op, std::int64_t tag,
                                                    const std::optional<Coding>& coding) {
  check_reduce_scatter(send, dtype, recv, epilogue, parts, op, comm->rank(), comm->size());
  if (!coding.has_value()) {
    return [=, comm = std::move(comm)](NativeStream stream) {
      comm->run_reduce_scatter(send, dtype, recv, epilogue, parts, op, tag, stream);
    };
  }
  check_coded(*comm, dtype);
  if (coding->blocks.has_value()) wire_bytes(*coding->blocks, 0);  // checks the format
  return [=, comm = std::move(comm), how = *coding](NativeStream) {
    comm->run_coded_reduce_scatter(send, dtype, recv, epilogue, parts, op, tag, how);
  };
}

void Communicator::all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op,
                              std::int64_t tag, NativeStream stream) {
  check_called(op, dtype);
  check_buffer("all_reduce", "buffer", buffer, count, dtype);
  run_all_reduce(buffer, dtype, count, op, tag, stream);
}

Stream::Operation Communicator::bind_all_reduce(std::shared_ptr<Communicator> comm, void* buffer,
                                                DType dtype, std::int64_t count, RedOp op,
                                                std::int64_t tag) {
  check_called(op, dtype);
  check_buffer("all_reduce", "buffer", buffer, count, dtype);
  return [=, comm = std::move(comm)](NativeStream stream) {
    comm->run_all_reduce(buffer, dtype, count, op, tag, stream);
  };
}

void Communicator::broadcast(void* buffer, DType dtype, std::int64_t count, int root,
                             NativeStream stream) {
  check_broadcast(buffer, dtype, count, root, size());
  run_broadcast(buffer, dtype, count, root, stream);
}

Stream::Operation Communicator::bind_broadcast(std::shared_ptr<Communicator> comm, void* buffer,
                                               DType dtype, std::int64_t count, int root) {
  check_broadcast(buffer, dtype, count, root, comm->size());
  return [=, comm = std::move(comm)](NativeStream stream) {
    comm->run_broadcast(buffer, dtype, count, root, stream);
  };
}

void Communicator::barrier(std::int64_t tag, NativeStream stream) { run_barrier(tag, stream); }

Stream::Operation Communicator::bind_barrier(std::shared_ptr<Communicator> comm, std::int64_t tag) {
  return [=, comm = std::move(comm)](NativeStream stream) { comm->run_barrier(tag, stream); };
}

Stream::Operation Communicator::bind_sharing(std::shared_ptr<Communicator> comm, const void* buffer,
                                             std::size_t bytes, std::int64_t tag) {
  return [=, comm = std::move(comm)](NativeStream) { comm->run_sharing(buffer, bytes, tag); };
}

}  // namespace shardcomm
