// What all transports do first in all_to_all, gather, scatter and reduce: they check what these are
// called with.
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/buffer.h"
#include "shardcomm/communicator.h"

namespace shardcomm {
namespace {

void check_root(const char* operation, int root, int size) {
  if (root >= 0 && root < size) return;
  throw std::invalid_argument(std::string(operation) + ": root is " + std::to_string(root) +
                              "; it must be a rank, 0 to " + std::to_string(size - 1));
}

[[noreturn]] void refuse_overlap(const char* operation, const char* in_place) {
  throw std::invalid_argument(std::string(operation) +
                              ": send overlaps recv; it must lie apart from it" + in_place);
}

void check_all_to_all(const void* send, const Parts& send_parts, const void* recv,
                      const Parts& recv_parts, DType dtype, int size) {
  check_parts("all_to_all: send_counts", send_parts, size);
  check_parts("all_to_all: recv_counts", recv_parts, size);
  const std::int64_t sent = send_parts.total(size);
  const std::int64_t received = recv_parts.total(size);
  check_buffer("all_to_all", "send", send, sent, dtype);
  check_buffer("all_to_all", "recv", recv, received, dtype);
  if (overlap(send, bytes_of(sent, dtype), recv, bytes_of(received, dtype))) {
    refuse_overlap("all_to_all", "");
  }
  if (size == 1 && sent != received) {  // several ranks compare their counts
    throw std::invalid_argument("all_to_all: send_counts[0] is " + std::to_string(sent) +
                                ", and recv_counts[0] is " + std::to_string(received) +
                                "; a rank receives from itself what it sends to itself");
  }
}

// `each` lies on every rank, and has `count` elements; `all`, on the root alone, has a part for
// each.
void check_parts_of_root(const char* operation, const char* each_name, const void* each,
                         const char* all_name, const void* all, DType dtype, std::int64_t count,
                         int root, int rank, int size) {
  check_root(operation, root, size);
  if (count > Parts::kMost / size) {
    throw std::invalid_argument(std::string(operation) + ": count is " + std::to_string(count) +
                                "; for " + std::to_string(size) + " ranks it must be at most " +
                                std::to_string(Parts::kMost / size));
  }
  check_buffer(operation, each_name, each, count, dtype);
  if (rank != root) return;
  check_buffer(operation, all_name, all, count * size, dtype);
  if (each == at(all, count * root, dtype)) return;
  if (overlap(each, bytes_of(count, dtype), all, bytes_of(count * size, dtype))) {
    const std::string own = part_of(all_name, Parts(count), root);
    refuse_overlap(operation, (" or, in place, be the root's part, " + own).c_str());
  }
}

void check_gather(const void* send, const void* recv, DType dtype, std::int64_t count, int root,
                  int rank, int size) {
  check_parts_of_root("gather", "send", send, "recv", recv, dtype, count, root, rank, size);
}

void check_scatter(const void* send, const void* recv, DType dtype, std::int64_t count, int root,
                   int rank, int size) {
  check_parts_of_root("scatter", "recv", recv, "send", send, dtype, count, root, rank, size);
}

void check_reduce(const void* send, const void* recv, DType dtype, std::int64_t count, RedOp op,
                  int root, int rank, int size) {
  check_root("reduce", root, size);
  check_called(op, dtype);
  check_buffer("reduce", "send", send, count, dtype);
  if (rank != root) return;
  check_buffer("reduce", "recv", recv, count, dtype);
  if (send == recv) return;
  if (overlap(send, bytes_of(count, dtype), recv, bytes_of(count, dtype))) {
    refuse_overlap("reduce", " or, in place, be the same");
  }
}

}  // namespace

void Communicator::all_to_all(const void* send, const Parts& send_parts, void* recv,
                              const Parts& recv_parts, DType dtype, std::int64_t tag,
                              NativeStream stream) {
  check_all_to_all(send, send_parts, recv, recv_parts, dtype, size());
  run_all_to_all(send, send_parts, recv, recv_parts, dtype, tag, stream);
}

Stream::Operation Communicator::bind_all_to_all(std::shared_ptr<Communicator> comm,
                                                const void* send, const Parts& send_parts,
                                                void* recv, const Parts& recv_parts, DType dtype,
                                                std::int64_t tag) {
  check_all_to_all(send, send_parts, recv, recv_parts, dtype, comm->size());
  return [=, comm = std::move(comm)](NativeStream stream) {
    comm->run_all_to_all(send, send_parts, recv, recv_parts, dtype, tag, stream);
  };
}

void Communicator::gather(const void* send, void* recv, DType dtype, std::int64_t count, int root,
                          std::int64_t tag, NativeStream stream) {
  check_gather(send, recv, dtype, count, root, rank(), size());
  run_gather(send, recv, dtype, count, root, tag, stream);
}

Stream::Operation Communicator::bind_gather(std::shared_ptr<Communicator> comm, const void* send,
                                            void* recv, DType dtype, std::int64_t count, int root,
                                            std::int64_t tag) {
  check_gather(send, recv, dtype, count, root, comm->rank(), comm->size());
  return [=, comm = std::move(comm)](NativeStream stream) {
    comm->run_gather(send, recv, dtype, count, root, tag, stream);
  };
}

void Communicator::scatter(const void* send, void* recv, DType dtype, std::int64_t count, int root,
                           std::int64_t tag, NativeStream stream) {
  check_scatter(send, recv, dtype, count, root, rank(), size());
  run_scatter(send, recv, dtype, count, root, tag, stream);
}

Stream::Operation Communicator::bind_scatter(std::shared_ptr<Communicator> comm, const void* send,
                                             void* recv, DType dtype, std::int64_t count, int root,
                                             std::int64_t tag) {
  check_scatter(send, recv, dtype, count, root, comm->rank(), comm->size());
  return [=, comm = std::move(comm)](NativeStream stream) {
    comm->run_scatter(send, recv, dtype, count, root, tag, stream);
  };
}

void Communicator::reduce(const void* send, void* recv, DType dtype, std::int64_t count, RedOp op,
                          int root, std::int64_t tag, NativeStream stream) {
  check_reduce(send, recv, dtype, count, op, root, rank(), size());
  run_reduce(send, recv, dtype, count, op, root, tag, stream);
}

Stream::Operation Communicator::bind_reduce(std::shared_ptr<Communicator> comm, const void* send,
                                            void* recv, DType dtype, std::int64_t count, RedOp op,
                                            int root, std::int64_t tag) {
  check_reduce(send, recv, dtype, count, op, root, comm->rank(), comm->size());
  return [=, comm = std::move(comm)](NativeStream stream) {
    comm->run_reduce(send, recv, dtype, count, op, root, tag, stream);
  };
}

}  // namespace shardcomm
