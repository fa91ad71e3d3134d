// The collectives that are not for shards alone, in C: all_to_all, gather, scatter and reduce.
#include <cstdint>
#include <vector>

#include "abi/arguments.h"
#include "abi/collective.h"
#include "abi/handles.h"
#include "abi/status.h"
#include "shardcomm.h"
#include "shardcomm/communicator.h"
#include "shardcomm/parts.h"

using shardcomm::Communicator;
using shardcomm::Parts;
using shardcomm::abi::checked;
using shardcomm::abi::dtype_of;
using shardcomm::abi::guarded;
using shardcomm::abi::hand_over_bound;
using shardcomm::abi::op_of;
using shardcomm::abi::required;
using shardcomm::abi::run_now_or_on;

namespace {

Parts parts_of(const shc_comm& comm, const int64_t* counts, const char* argument) {
  required(counts, argument);
  return Parts(std::vector<std::int64_t>(counts, counts + comm.comm->size()), argument);
}

}  // namespace

shc_status shc_all_to_all(shc_comm* comm, const void* send, const int64_t* send_counts, void* recv,
                          const int64_t* recv_counts, shc_dtype dtype, int64_t tag,
                          shc_stream* stream) {
  return guarded("shc_all_to_all", [&] {
    const shc_comm& known = checked(comm, "comm");
    const Parts sent = parts_of(known, send_counts, "send_counts");
    const Parts received = parts_of(known, recv_counts, "recv_counts");
    const auto type = dtype_of(dtype, "dtype");
    run_now_or_on(
        stream, known, [&] { known.comm->all_to_all(send, sent, recv, received, type, tag); },
        [&] {
          return Communicator::bind_all_to_all(known.comm, send, sent, recv, received, type, tag);
        });
  });
}

shc_status shc_bind_all_to_all(shc_comm* comm, const void* send, const int64_t* send_counts,
                               void* recv, const int64_t* recv_counts, shc_dtype dtype, int64_t tag,
                               shc_collective** collective) {
  return hand_over_bound("shc_bind_all_to_all", comm, collective, [&](const shc_comm& known) {
    return Communicator::bind_all_to_all(
        known.comm, send, parts_of(known, send_counts, "send_counts"), recv,
        parts_of(known, recv_counts, "recv_counts"), dtype_of(dtype, "dtype"), tag);
  });
}

shc_status shc_gather(shc_comm* comm, const void* send, void* recv, shc_dtype dtype, int64_t count,
                      int root, int64_t tag, shc_stream* stream) {
  return guarded("shc_gather", [&] {
    const shc_comm& known = checked(comm, "comm");
    const auto type = dtype_of(dtype, "dtype");
    run_now_or_on(
        stream, known, [&] { known.comm->gather(send, recv, type, count, root, tag); },
        [&] { return Communicator::bind_gather(known.comm, send, recv, type, count, root, tag); });
  });
}

shc_status shc_bind_gather(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                           int64_t count, int root, int64_t tag, shc_collective** collective) {
  return hand_over_bound("shc_bind_gather", comm, collective, [&](const shc_comm& known) {
    return Communicator::bind_gather(known.comm, send, recv, dtype_of(dtype, "dtype"), count, root,
                                     tag);
  });
}

shc_status shc_scatter(shc_comm* comm, const void* send, void* recv, shc_dtype dtype, int64_t count,
                       int root, int64_t tag, shc_stream* stream) {
  return guarded("shc_scatter", [&] {
    const shc_comm& known = checked(comm, "comm");
    const auto type = dtype_of(dtype, "dtype");
    run_now_or_on(
        stream, known, [&] { known.comm->scatter(send, recv, type, count, root, tag); },
        [&] { return Communicator::bind_scatter(known.comm, send, recv, type, count, root, tag); });
  });
}

shc_status shc_bind_scatter(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                            int64_t count, int root, int64_t tag, shc_collective** collective) {
  return hand_over_bound("shc_bind_scatter", comm, collective, [&](const shc_comm& known) {
    return Communicator::bind_scatter(known.comm, send, recv, dtype_of(dtype, "dtype"), count, root,
                                      tag);
  });
}

shc_status shc_reduce(shc_comm* comm, const void* send, void* recv, shc_dtype dtype, int64_t count,
                      shc_op op, int root, int64_t tag, shc_stream* stream) {
  return guarded("shc_reduce", [&] {
    const shc_comm& known = checked(comm, "comm");
    const auto type = dtype_of(dtype, "dtype");
    const auto with = op_of(op);
    run_now_or_on(
        stream, known, [&] { known.comm->reduce(send, recv, type, count, with, root, tag); },
        [&] {
          return Communicator::bind_reduce(known.comm, send, recv, type, count, with, root, tag);
        });
  });
}

shc_status shc_bind_reduce(shc_comm* comm, const void* send, void* recv, shc_dtype dtype,
                           int64_t count, shc_op op, int root, int64_t tag,
                           shc_collective** collective) {
  return hand_over_bound("shc_bind_reduce", comm, collective, [&](const shc_comm& known) {
    return Communicator::bind_reduce(known.comm, send, recv, dtype_of(dtype, "dtype"), count,
                                     op_of(op), root, tag);
  });
}
