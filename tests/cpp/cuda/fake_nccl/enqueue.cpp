// Collective calls: what the caller's thread does until the kernel is launched. After enqueue.cc.
#include "fake_nccl/comm.h"
#include "fake_nccl/reduce.h"

namespace fake_nccl {
namespace {

// ArgsCheck (misc/argcheck.cc)
bool valid(const Comm* comm, const Work& work) {
  if (!known_dtype(work.dtype) || work.op < op_sum || work.op > op_avg) return false;
  if (work.root < 0 || work.root >= comm->size()) return false;
  for (const Message& each : work.messages) {
    if (each.peer < 0 || each.peer >= comm->size()) return false;
  }
  return true;
}

// Messages of one communicator on one stream become one kernel.
void append(Comm* comm, Work work, cudaStream_t stream) {
  join_group(comm);
  auto& tasks = group().job->tasks;
  if (work.kind == Kind::messages) {
    for (Task& task : tasks) {
      if (task.comm != comm || task.stream != stream || task.work.messages.empty()) continue;
      task.work.messages.push_back(work.messages.front());
      return;
    }
  } else if (work.count == 0) {
    return;  // nothing to launch
  }
  tasks.push_back({comm, std::move(work), stream});
}

}  // namespace

// ncclEnqueueCheck
Result enqueue(FakeCall call, Comm* comm, Work work, cudaStream_t stream) {
  if (instant()) return success;
  if (!known(comm)) return group_error(invalid_argument);
  const InCall guard(comm);
  group_start();
  Result result = fault_of(call, comm->rank);
  if (result == success) result = ensure_ready(comm);
  if (result == success && !valid(comm, work)) {
    count(&FakeNcclCounts::bad_arguments);
    result = invalid_argument;
  }
  if (result == success) append(comm, std::move(work), stream);
  if (result != success && !comm->blocking) comm->state = result;
  group_error(result);
  const Result ended = group_end();
  if (ended != success && ended != in_progress) return ended;
  if (!comm->blocking) {
    int state = success;
    async_error(comm, &state);
    result = static_cast<Result>(state);
  }
  return result;
}

// Collectives connect the algorithm that they take, with all ranks, the first time (since 2.22,
// with CUDA's memory API: comm->cuMemSupport; ncclCollPreconnect); symmetric kernels and copy
// engines need no connection. Messages connect each pair and direction the first time, in every
// version (ncclTransportP2pSetup).
Result connect_for(Comm* comm, const Work& work) {
  std::vector<std::string> pairs;
  for (const Message& each : work.messages) {
    if (each.peer == comm->rank) continue;
    const int from = each.sent ? comm->rank : each.peer;
    const int to = each.sent ? each.peer : comm->rank;
    pairs.push_back(std::to_string(from) + " to " + std::to_string(to));
  }
  if (!work.messages.empty()) return connect(comm, std::move(pairs), 2);
  if (!kConnectsLazily || !comm->cumem || comm->size() == 1) return success;
  if (path_of(comm, work) != Path::ring) return success;
  return connect(comm, {work.kind == Kind::reduce ? "tree" : "ring"}, comm->size());
}

}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

Result ncclAllGather(const char* send, char* recv, std::size_t count, int dtype, Comm* comm,
                     cudaStream_t stream) {
  return enqueue(FakeCall::all_gather, comm, {Kind::gather, send, recv, count, dtype}, stream);
}

Result ncclReduceScatter(const char* send, char* recv, std::size_t count, int dtype, int op,
                         Comm* comm, cudaStream_t stream) {
  return enqueue(FakeCall::reduce_scatter, comm, {Kind::scatter, send, recv, count, dtype, op},
                 stream);
}

Result ncclAllReduce(const char* send, char* recv, std::size_t count, int dtype, int op, Comm* comm,
                     cudaStream_t stream) {
  return enqueue(FakeCall::all_reduce, comm, {Kind::reduce, send, recv, count, dtype, op}, stream);
}

Result ncclBroadcast(const char* send, char* recv, std::size_t count, int dtype, int root,
                     Comm* comm, cudaStream_t stream) {
  return enqueue(FakeCall::broadcast, comm,
                 {Kind::broadcast, send, recv, count, dtype, op_sum, root}, stream);
}

// Its ring ends at the root, the only rank whose `recv` is looked at (device/reduce.h, runRing).
Result ncclReduce(const char* send, char* recv, std::size_t count, int dtype, int op, int root,
                  Comm* comm, cudaStream_t stream) {
  return enqueue(FakeCall::reduce, comm, {Kind::reduce_to, send, recv, count, dtype, op, root},
                 stream);
}

Result ncclSend(char* data, std::size_t count, int dtype, int peer, Comm* comm,
                cudaStream_t stream) {
  Work work;
  work.dtype = dtype;
  if (known_dtype(dtype)) work.messages = {{true, data, count * item_bytes(dtype), peer}};
  return enqueue(FakeCall::send, comm, std::move(work), stream);
}

Result ncclRecv(char* data, std::size_t count, int dtype, int peer, Comm* comm,
                cudaStream_t stream) {
  Work work;
  work.dtype = dtype;
  if (known_dtype(dtype)) work.messages = {{false, data, count * item_bytes(dtype), peer}};
  return enqueue(FakeCall::recv, comm, std::move(work), stream);
}

}  // extern "C"
