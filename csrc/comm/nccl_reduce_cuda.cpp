// What combines the ranks' values, over NCCL: reduce_scatter and all_reduce.
#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

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
    case DType::i8:
      break;
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
    case RedOp::prod:
      return nccl::kProd;
    case RedOp::band:
    case RedOp::bor:
    case RedOp::bxor:
    case RedOp::exact_sum:
    case RedOp::exact_avg:
      break;
  }
  throw std::invalid_argument("this reduction is not one of NCCL's");
}

// Products are NCCL's alone, whose rings would round those of 16-bit floats at every step.
void check_on_nccl(DType dtype, RedOp op) {
  if (op == RedOp::prod && itemsize(dtype) != 2 && dtype != DType::i8) return;
  check_on_device(dtype, op);
}

// NCCL's rings round 16-bit floats at every addition.
bool rounds_sums(DType dtype, RedOp op) {
  return (op == RedOp::sum || op == RedOp::avg) && (dtype == DType::f16 || dtype == DType::bf16);
}

}  // namespace

void NcclCommunicator::run_reduce_scatter(const void* send, DType dtype, void* recv,
                                          const Epilogue& epilogue, const Parts& parts, RedOp op,
                                          std::int64_t tag, NativeStream native) {
  static constexpr Path kReduces{
      "nccl", "reduces", "nccl: it scatters equal parts alone: a group of one reduce a rank"};
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
  check_on_nccl(dtype, op);
  Call call;
  call.op = Op::reduce_scatter;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.uneven = !parts.equal();
  call.count = call.uneven ? parts.total(size()) : parts.count(rank());
  call.tag = tag;
  const Nodes& nodes = session_->nodes;
  const bool by_nodes = nodes.uniform() && nodes.count() > 1 && nodes.size() > 1 &&
                        nodes.size() <= kMostSources && nodes.count() <= kMostSources;
  const Path* path = parts.equal() ? &kDirect : &kReduces;
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
  if (call.count == 0) return skip(session_->reduces, call, *path);
  run(session_->reduces, call, native, *path, [&](NcclUse& use, cudaStream_t stream) {
    (this->*way)(use, call, parts, send, recv, epilogue, stream);
  });
}

void NcclCommunicator::reduce(NcclUse& use, const Call& call, const Parts& parts, const void* send,
                              void* recv, const Epilogue& epilogue, cudaStream_t stream) {
  const DType dtype = call.send_dtype;
  const std::int64_t count = parts.count(rank());
  const std::size_t bytes = bytes_of(count, dtype);
  const auto elements = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const auto into = [&](void* reduced) {
    const nccl::Reduction reduction = nccl_reduction(dtype, call.red_op);
    if (parts.equal()) {
      use([&](nccl::Comm comm) {
        return nccl_.reduce_scatter(send, reduced, elements(count), nccl_dtype(dtype), reduction,
                                    comm, stream);
      });
      return;
    }
    use.group([&](const auto& note, nccl::Comm comm) {
      for (int root = 0; root < size(); ++root) {  // `reduced` counts where this rank is the root
        if (parts.count(root) == 0) continue;
        note(nccl_.reduce(at(send, parts.begin(root), dtype), reduced, elements(parts.count(root)),
                          nccl_dtype(dtype), reduction, root, comm, stream));
      }
    });
  };
  // NCCL has no epilogue. Ours is a reduction of its result alone; in place, where nothing is left
  // to do but to divide, or to look for NaN and Inf.
  const bool divides = call.red_op == RedOp::avg && !divided_by_nccl(dtype, call.red_op);
  const auto finish = [&](const void* reduced) {
    reduce_cuda(recv, epilogue, &reduced, 1, dtype, divides ? RedOp::avg : RedOp::sum,
                session_->size, count, stream);
  };
  if (count == 0) return into(recv);
  const auto memory =
      registered_at(session_->reduces, send, bytes_of(parts.total(session_->size), dtype));
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

// Both sides of a reduce-scatter's messages, which lie in memory that NCCL knows, or neither does.
//
// NCCL looks at each side alone (enqueue.cc, addP2pToPlan). If one side is registered and the other
// is not, a sender waits for an address that the receiver never posts, or a receiver takes the data
// for written already (device/prims_simple.h, setDataPtrs and genericOp). Over a network, what is
// sent at once is cut to the receiver's chunk (transport/net_ib.cc, ncclIbIsend). In a capture NCCL
// registers by itself what it can (NCCL_GRAPH_REGISTER): the caller's memory, and scratch never.
class NcclCommunicator::Messages {
 public:
  // `most`: the bytes that the rank receives which receives most. All ranks decide alike, as each
  // sends out of communication memory or none does.
  Messages(NcclCommunicator& comm, NcclUse& use, const void* send, std::size_t bytes,
           std::size_t received, std::size_t most, cudaStream_t stream)
      : send_(send) {
    if (most == 0) return;
    const auto memory = registered_at(comm.session_->reduces, send, bytes);
    const bool known = memory != nullptr && memory->known_to_nccl();
    if (known && most <= memory->bytes) received_ = comm.inbox_of(use, *memory);
    if (received_ != nullptr) return;
    received_ = room_.emplace(comm.scratch_, received, stream).data();
    if (!known && !use.captured()) return;
    send_ = copy_.emplace(comm.scratch_, bytes, stream).data();
    check_cuda(cudaMemcpyAsync(copy_->data(), send, bytes, cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
  }
  const void* send() const { return send_; }
  void* received() const { return received_; }

 private:
  const void* send_;
  void* received_ = nullptr;
  std::optional<Scratch> room_;
  std::optional<Scratch> copy_;
};

// Each rank gets all ranks' versions of its own slice and sums them in rank order, so the result is
// the same bit for bit from run to run.
void NcclCommunicator::exchange(NcclUse& use, const Call& call, const Parts& parts,
                                const void* send, void* recv, const Epilogue& epilogue,
                                cudaStream_t stream) {
  const DType dtype = call.send_dtype;
  const int rank = session_->rank;
  const int size = session_->size;
  const std::int64_t count = parts.count(rank);
  const auto received = [&](std::int64_t part) { return bytes_of((size - 1) * part, dtype); };
  const Messages messages(*this, use, send, bytes_of(parts.total(size), dtype), received(count),
                          received(parts.longest()), stream);
  std::array<const void*, kMostSources> sources{};
  sources[static_cast<std::size_t>(rank)] = at(send, parts.begin(rank), dtype);
  use.group([&](const auto& note, nccl::Comm comm) {
    for (int i = 1; i < size; ++i) {
      const int to = (rank + i) % size;
      const int from = (rank - i + size) % size;
      void* slot = at(messages.received(), (i - 1) * count, dtype);
      sources[static_cast<std::size_t>(from)] = slot;
      if (parts.count(to) > 0) {
        note(nccl_.send(at(messages.send(), parts.begin(to), dtype),
                        bytes_of(parts.count(to), dtype), nccl::kUint8, to, comm, stream));
      }
      if (count > 0) {
        note(nccl_.recv(slot, bytes_of(count, dtype), nccl::kUint8, from, comm, stream));
      }
    }
  });
  reduce_cuda(recv, epilogue, sources.data(), size, dtype, call.red_op, size, count, stream);
}

//   2 hosts of 2 ranks: A0 A1 B0 B1. A0's slices a b c d (for A0 A1 B0 B1), A1's a' b' c' d':
//   within A    A1 gives A0 a' c';  A0 has a+a' and c+c' (its index on every host), in 32 bits
//   between     A0 gives B0 c+c', rounded;  B0 gives A0 its partial sum of a
//   A0          sums the hosts' partial sums, in the order of the hosts
//
// What leaves a host: (hosts - 1) slices a rank, where a ring takes ranks - 1 slices out of it.
void NcclCommunicator::reduce_by_nodes(NcclUse& use, const Call& call, const Parts& parts,
                                       const void* send, void* recv, const Epilogue& epilogue,
                                       cudaStream_t stream) {
  const Nodes& nodes = session_->nodes;
  const DType dtype = call.send_dtype;
  const int node = nodes.node_of(session_->rank);
  const int index = nodes.index_of(session_->rank);
  const int hosts = nodes.count();
  const int ranks = nodes.size();
  const std::int64_t count = parts.count(session_->rank);
  const auto host = [](int k) { return static_cast<std::size_t>(k); };
  const auto starts_of = [&](int i) {  // of the slices for index i on each host, in a row
    std::vector<std::int64_t> starts{0};
    for (int k = 0; k < hosts; ++k) {
      starts.push_back(starts.back() + parts.count(nodes.rank_at(k, i)));
    }
    return starts;
  };
  const std::vector<std::int64_t> starts = starts_of(index);
  const std::int64_t row = starts.back();
  std::int64_t longest_row = row;
  for (int i = 0; i < ranks && !parts.equal(); ++i) {
    longest_row = std::max(longest_row, starts_of(i).back());
  }

  // slot(i, k): rank i of this host's version of the slice for this index on host k.
  const Messages messages(*this, use, send, bytes_of(parts.total(session_->size), dtype),
                          bytes_of(ranks * row, dtype), bytes_of(ranks * longest_row, dtype),
                          stream);
  const auto slot = [&](int i, int k) {
    return at(messages.received(), i * row + starts[host(k)], dtype);
  };
  const auto to_peer = [&](const auto& note, nccl::Comm comm, const void* slice, std::int64_t n,
                           int peer) {
    if (n == 0) return;
    note(nccl_.send(slice, bytes_of(n, dtype), nccl::kUint8, peer, comm, stream));
  };
  const auto from_peer = [&](const auto& note, nccl::Comm comm, void* slice, std::int64_t n,
                             int peer) {
    if (n == 0) return;
    note(nccl_.recv(slice, bytes_of(n, dtype), nccl::kUint8, peer, comm, stream));
  };
  const auto length = [&](int k) { return starts[host(k) + 1] - starts[host(k)]; };
  use.group([&](const auto& note, nccl::Comm comm) {
    for (int i = 0; i < ranks; ++i) {  // to itself too: so the slices of each rank lie together
      const int peer = nodes.rank_at(node, i);
      for (int k = 0; k < hosts; ++k) {
        const int owner = nodes.rank_at(k, i);
        to_peer(note, comm, at(messages.send(), parts.begin(owner), dtype), parts.count(owner),
                peer);
        from_peer(note, comm, slot(i, k), length(k), peer);
      }
    }
  });
  const Scratch partial(scratch_, bytes_of(row, dtype), stream);
  std::array<const void*, kMostSources> sources{};
  for (int i = 0; i < ranks; ++i) sources[static_cast<std::size_t>(i)] = slot(i, 0);
  // An average is taken of the host's ranks, and then of the hosts: a sum might overflow fp16.
  reduce_cuda(partial.data(), Epilogue{dtype}, sources.data(), ranks, dtype, call.red_op, ranks,
              row, stream);

  const Scratch partials(scratch_, bytes_of(hosts * count, dtype), stream);
  const auto partial_for = [&](int k) { return at(partial.data(), starts[host(k)], dtype); };
  const auto partial_of = [&](int k) { return at(partials.data(), k * count, dtype); };
  use.group([&](const auto& note, nccl::Comm comm) {
    for (int i = 1; i < hosts; ++i) {
      const int to = (node + i) % hosts;
      const int from = (node - i + hosts) % hosts;
      to_peer(note, comm, partial_for(to), length(to), nodes.rank_at(to, index));
      from_peer(note, comm, partial_of(from), count, nodes.rank_at(from, index));
    }
  });
  for (int k = 0; k < hosts; ++k) {
    sources[host(k)] = k == node ? partial_for(k) : partial_of(k);
  }
  reduce_cuda(recv, epilogue, sources.data(), hosts, dtype, call.red_op, hosts, count, stream);
}

void NcclCommunicator::run_all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op,
                                      std::int64_t tag, NativeStream native) {
  static constexpr Path kNarrow{
      "nccl", "nccl", "nccl: it accumulates in the buffer's dtype, 16-bit floats in 16 bits"};
  check_on_nccl(dtype, op);
  Call call;
  call.op = Op::all_reduce;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.count = count;
  call.tag = tag;
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
