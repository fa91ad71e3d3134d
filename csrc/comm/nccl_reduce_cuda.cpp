// What combines the ranks' values, over NCCL: reduce_scatter and all_reduce.
#include <array>
#include <stdexcept>
#include <string>

#include "comm/buffer.h"
#include "comm/nccl_communicator.h"
#include "copy/reduce_cuda.h"

namespace shardcomm {
namespace {

nccl::DataType nccl_dtype(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return nccl::kUint8;
    case DType::i32:
      return nccl::kInt32;
    case DType::i64:
      return nccl::kInt64;
    case DType::f16:
      return nccl::kFloat16;
    case DType::bf16:
      return nccl::kBfloat16;
    case DType::f32:
      return nccl::kFloat32;
    case DType::f64:
      return nccl::kFloat64;
  }
  throw std::invalid_argument("this dtype is not one of NCCL's");
}

// An average is NCCL's sum, divided by us; but the sum of fp16 would overflow where NCCL's average,
// which divides first, does not.
bool divided_by_nccl(DType dtype, RedOp op) { return op == RedOp::avg && dtype == DType::f16; }

nccl::Reduction nccl_reduction(DType dtype, RedOp op) {
  switch (op) {
    case RedOp::sum:
      return nccl::kSum;
    case RedOp::avg:
      return divided_by_nccl(dtype, op) ? nccl::kAvg : nccl::kSum;
    case RedOp::max:
      return nccl::kMax;
    case RedOp::min:
      return nccl::kMin;
  }
  throw std::invalid_argument("this reduction is not one of NCCL's");
}

// NCCL's rings round 16-bit floats at every addition.
bool rounds_sums(DType dtype, RedOp op) {
  return (op == RedOp::sum || op == RedOp::avg) && (dtype == DType::f16 || dtype == DType::bf16);
}

}  // namespace

void NcclCommunicator::reduce_scatter(const void* send, DType dtype, void* recv,
                                      const Epilogue& epilogue, std::int64_t count, RedOp op,
                                      std::int64_t tag, NativeStream native) {
  static constexpr Path kExchanged{
      "nccl", "exchange",
      "nccl: it would accumulate 16-bit floats in 16 bits: the ranks exchange their slices, and "
      "each reduces its own"};
  static constexpr Path kByNodes{"nccl", "hierarchical",
                                 "nccl: it would accumulate 16-bit floats in 16 bits: the ranks of "
                                 "a host exchange and reduce, "
                                 "then the hosts exchange partial sums, rounded once"};
  static constexpr Path kTooMany{"exchange", "nccl",
                                 "nccl: more ranks than one kernel reduces, 256, on hosts with "
                                 "different numbers of them or on "
                                 "one: accumulated by NCCL, in the buffer's dtype"};
  check_reduce_scatter(send, dtype, recv, epilogue.dtype, count, rank(), size());
  check_epilogue(epilogue, dtype);
  Call call;
  call.op = Op::reduce_scatter;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.count = count;
  call.tag = tag;
  const Nodes& nodes = session_->nodes;
  const bool by_nodes = nodes.uniform() && nodes.count() > 1 && nodes.size() > 1 &&
                        nodes.size() <= kMostSources && nodes.count() <= kMostSources;
  const Path* path = &kDirect;
  auto way = &NcclCommunicator::reduce;
  if (rounds_sums(dtype, op)) {
    if (by_nodes) {
      path = &kByNodes;
      way = &NcclCommunicator::reduce_by_nodes;
    } else if (session_->size <= kMostSources) {
      path = &kExchanged;
      way = &NcclCommunicator::exchange;
    } else {
      path = &kTooMany;
    }
  }
  if (count == 0) return skip(session_->reduces, call, *path);
  run(session_->reduces, call, native, *path, [&](NcclUse& use, cudaStream_t stream) {
    (this->*way)(use, call, send, recv, epilogue, stream);
  });
}

void NcclCommunicator::reduce(NcclUse& use, const Call& call, const void* send, void* recv,
                              const Epilogue& epilogue, cudaStream_t stream) {
  const DType dtype = call.send_dtype;
  const std::size_t bytes = bytes_of(call.count, dtype);
  const auto into = [&](void* reduced) {
    use([&](nccl::Comm comm) {
      return nccl_.reduce_scatter(send, reduced, static_cast<std::size_t>(call.count),
                                  nccl_dtype(dtype), nccl_reduction(dtype, call.red_op), comm,
                                  stream);
    });
  };
  // NCCL has no epilogue. Ours is a reduction of its result alone; in place, where nothing is left
  // to do but to divide, or to look for NaN and Inf.
  const bool divides = call.red_op == RedOp::avg && !divided_by_nccl(dtype, call.red_op);
  const auto finish = [&](const void* reduced) {
    reduce_cuda(recv, epilogue, &reduced, 1, dtype, divides ? RedOp::avg : RedOp::sum,
                session_->size, call.count, stream);
  };
  const auto memory =
      registered_at(session_->reduces, send, bytes * static_cast<std::size_t>(session_->size));
  if (memory != nullptr && memory->landing != nullptr && bytes <= memory->landing_bytes) {
    into(memory->landing);
    return finish(memory->landing);
  }
  if (epilogue.dtype == dtype && epilogue.scale == 1.0f && !epilogue.accumulate) {
    into(recv);
    if (epilogue.nonfinite != nullptr || divides) finish(recv);
    return;
  }
  const Scratch reduced(scratch_, bytes, stream);
  into(reduced.data());
  finish(reduced.data());
}

// Each rank gets all ranks' versions of its own slice and sums them in rank order, so the result is
// the same bit for bit from run to run.
void NcclCommunicator::exchange(NcclUse& use, const Call& call, const void* send, void* recv,
                                const Epilogue& epilogue, cudaStream_t stream) {
  const DType dtype = call.send_dtype;
  const std::size_t bytes = bytes_of(call.count, dtype);
  const int rank = session_->rank;
  const int size = session_->size;
  const Scratch received(scratch_, bytes * static_cast<std::size_t>(size), stream);
  std::array<const void*, kMostSources> sources{};
  sources[static_cast<std::size_t>(rank)] = at(send, rank * call.count, dtype);
  use.group([&](const auto& note, nccl::Comm comm) {
    for (int i = 1; i < size; ++i) {
      const int to = (rank + i) % size;
      const int from = (rank - i + size) % size;
      void* slot = at(received.data(), (i - 1) * call.count, dtype);
      sources[static_cast<std::size_t>(from)] = slot;
      note(nccl_.send(at(send, to * call.count, dtype), bytes, nccl::kUint8, to, comm, stream));
      note(nccl_.recv(slot, bytes, nccl::kUint8, from, comm, stream));
    }
  });
  reduce_cuda(recv, epilogue, sources.data(), size, dtype, call.red_op, size, call.count, stream);
}

//   2 hosts of 2 ranks: A0 A1 B0 B1. A0's slices a b c d (for A0 A1 B0 B1), A1's a' b' c' d':
//   within A    A1 gives A0 a' c';  A0 has a+a' and c+c' (its index on every host), in 32 bits
//   between     A0 gives B0 c+c', rounded;  B0 gives A0 its partial sum of a
//   A0          sums the hosts' partial sums, in the order of the hosts
//
// What leaves a host: (hosts - 1) slices a rank, where a ring takes ranks - 1 slices out of it.
void NcclCommunicator::reduce_by_nodes(NcclUse& use, const Call& call, const void* send, void* recv,
                                       const Epilogue& epilogue, cudaStream_t stream) {
  const Nodes& nodes = session_->nodes;
  const DType dtype = call.send_dtype;
  const std::size_t bytes = bytes_of(call.count, dtype);
  const int node = nodes.node_of(session_->rank);
  const int index = nodes.index_of(session_->rank);
  const int hosts = nodes.count();
  const int ranks = nodes.size();
  const auto slices = [&](int count) { return bytes * static_cast<std::size_t>(count); };

  // slot(i, k): rank i of this host's version of the slice for this index on host k.
  const Scratch received(scratch_, slices(ranks * hosts), stream);
  const auto slot = [&](int i, int k) {
    return at(received.data(), (i * hosts + k) * call.count, dtype);
  };
  use.group([&](const auto& note, nccl::Comm comm) {
    for (int i = 0; i < ranks; ++i) {  // to itself too: so the slices of each rank lie together
      const int peer = nodes.rank_at(node, i);
      for (int k = 0; k < hosts; ++k) {
        const void* slice = at(send, nodes.rank_at(k, i) * call.count, dtype);
        note(nccl_.send(slice, bytes, nccl::kUint8, peer, comm, stream));
        note(nccl_.recv(slot(i, k), bytes, nccl::kUint8, peer, comm, stream));
      }
    }
  });
  const Scratch partial(scratch_, slices(hosts), stream);
  std::array<const void*, kMostSources> sources{};
  for (int i = 0; i < ranks; ++i) sources[static_cast<std::size_t>(i)] = slot(i, 0);
  // An average is taken of the host's ranks, and then of the hosts: a sum might overflow fp16.
  reduce_cuda(partial.data(), Epilogue{dtype}, sources.data(), ranks, dtype, call.red_op, ranks,
              hosts * call.count, stream);

  const Scratch partials(scratch_, slices(hosts), stream);
  const auto of_host = [&](void* all, int k) { return at(all, k * call.count, dtype); };
  use.group([&](const auto& note, nccl::Comm comm) {
    for (int i = 1; i < hosts; ++i) {
      const int to = (node + i) % hosts;
      const int from = (node - i + hosts) % hosts;
      note(nccl_.send(of_host(partial.data(), to), bytes, nccl::kUint8, nodes.rank_at(to, index),
                      comm, stream));
      note(nccl_.recv(of_host(partials.data(), from), bytes, nccl::kUint8,
                      nodes.rank_at(from, index), comm, stream));
    }
  });
  for (int k = 0; k < hosts; ++k) {
    sources[static_cast<std::size_t>(k)] = of_host(k == node ? partial.data() : partials.data(), k);
  }
  reduce_cuda(recv, epilogue, sources.data(), hosts, dtype, call.red_op, hosts, call.count, stream);
}

void NcclCommunicator::all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op,
                                  NativeStream native) {
  static constexpr Path kNarrow{
      "nccl", "nccl", "nccl: it accumulates in the buffer's dtype, 16-bit floats in 16 bits"};
  check_buffer("all_reduce", "buffer", buffer, count);
  Call call;
  call.op = Op::all_reduce;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.count = count;
  const Path& path = rounds_sums(dtype, op) ? kNarrow : kDirect;
  if (count == 0) return skip(session_->reduces, call, path);
  run(session_->reduces, call, native, path, [&](NcclUse& use, cudaStream_t stream) {
    use([&](nccl::Comm comm) {
      return nccl_.all_reduce(buffer, buffer, static_cast<std::size_t>(count), nccl_dtype(dtype),
                              nccl_reduction(dtype, op), comm, stream);
    });
    if (op != RedOp::avg || divided_by_nccl(dtype, op)) return;
    const void* sum = buffer;
    reduce_cuda(buffer, Epilogue{dtype}, &sum, 1, dtype, op, session_->size, count, stream);
  });
}

}  // namespace shardcomm
