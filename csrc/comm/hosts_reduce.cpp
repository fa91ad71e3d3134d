// What combines the values of all ranks of all hosts: reduce_scatter and all_reduce. The ranks of a
// host combine theirs first, so that one partial result a host crosses; then the hosts' are
// combined. That is the order of reduce_cpu, bit for bit, if the ranks of a host are 2, 4, 8, ...
// and their results cross as they are, and not coded.
#include <algorithm>
#include <vector>

#include "comm/buffer.h"
#include "comm/chunks.h"
#include "comm/hosts.h"
#include "copy/copy_bytes.h"
#include "copy/round_cpu.h"
#include "shardcomm/blocks.h"
#include "shardcomm/tile.h"

namespace shardcomm {
namespace {

// Partial results of 16-bit floats are not rounded to 16 bits.
DType partial_dtype(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 ? DType::f32 : dtype;
}

// A mean's partial results are sums.
RedOp partial_op(RedOp op) { return op == RedOp::avg ? RedOp::sum : op; }

Parts even_parts(std::int64_t count, int size) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < size; ++r) counts.push_back(count / size + (r < count % size ? 1 : 0));
  return Parts(counts);
}

std::size_t coded_bytes(const Coding& coding, std::int64_t count) {
  if (!coding.blocks.has_value()) return bytes_of(count, DType::bf16);
  return static_cast<std::size_t>(wire_bytes(*coding.blocks, count));
}

// Codes `count` partial sums of a part that has room for more.
void code(const Coding& coding, const float* sums, std::int64_t count, std::byte* part,
          std::size_t bytes, std::uint64_t seed) {
  if (!coding.blocks.has_value()) {
    return round_to_bf16(sums, reinterpret_cast<BFloat16*>(part), count, coding.stats);
  }
  encode_cpu(*coding.blocks, {{sums, count, 0}}, DType::f32, part, static_cast<std::int64_t>(bytes),
             seed, coding.stats);
}

}  // namespace

template <class Of>
void HostsCommunicator::combine_host(Lane& lane, Of&& of, DType dtype, RedOp op, void* to,
                                     std::int64_t count) {
  for (int i = 0; i < local_; ++i) lane.sources[static_cast<std::size_t>(i)] = of(i);
  reduce_cpu(to, {partial_dtype(dtype)}, lane.sources.data(), local_, dtype, partial_op(op), 1,
             count);
}

void HostsCommunicator::run_reduce_scatter(const void* send, DType dtype, void* recv,
                                           const Epilogue& epilogue, const Parts& parts, RedOp op,
                                           std::int64_t tag, NativeStream) {
  reduce_and_scatter(send, dtype, recv, epilogue, parts, op, tag, nullptr);
}

void HostsCommunicator::run_coded_reduce_scatter(const void* send, DType dtype, void* recv,
                                                 const Epilogue& epilogue, const Parts& parts,
                                                 RedOp op, std::int64_t tag, const Coding& coding) {
  reduce_and_scatter(send, dtype, recv, epilogue, parts, op, tag, &coding);
}

void HostsCommunicator::reduce_and_scatter(const void* send, DType dtype, void* recv,
                                           const Epilogue& epilogue, const Parts& parts, RedOp op,
                                           std::int64_t tag, const Coding* coding) {
  Lane& lane = reduces_;
  Call call;
  call.op = Op::reduce_scatter;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  if (coding != nullptr) call.coding = key_of(*coding);
  call.count = parts.equal() ? parts.count(rank()) : parts.total(size());
  call.tag = tag;
  call.send =
      on_host_->own_place_of(send, bytes_of(parts.total(size()), dtype), "reduce_scatter: send");
  on_host_->own_place_of(recv, bytes_of(parts.count(rank()), epilogue.dtype),
                         "reduce_scatter: recv");
  perform(lane, call, parts, [&] {
    start_greeting(lane);
    reduce_parts(lane, send, dtype, recv, epilogue, parts, op, coding);
  });
}

void HostsCommunicator::run_all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op,
                                       std::int64_t tag, NativeStream) {
  Lane& lane = reduces_;
  Call call;
  call.op = Op::all_reduce;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.count = count;
  call.tag = tag;
  const std::size_t bytes = bytes_of(count, dtype);
  call.send = on_host_->own_place_of(buffer, bytes, "all_reduce: buffer");
  perform(lane, call, {}, [&] {
    if (bytes_of(count, partial_dtype(dtype)) <= Hello::kRoom) {
      return reduce_small(lane, buffer, dtype, count, op);
    }
    start_greeting(lane);
    const Parts parts = even_parts(count, size());
    reduce_parts(lane, buffer, dtype, at(buffer, parts.begin(rank()), dtype), {dtype}, parts, op,
                 nullptr);
    on_host_->meet(lane.channel);  // all have used the stage
    gather_parts(lane, static_cast<std::byte*>(buffer), dtype, parts, false, false);
  });
}

// Every rank reduces all of it: few bytes, and one crossing instead of two.
void HostsCommunicator::reduce_small(Lane& lane, void* buffer, DType dtype, std::int64_t count,
                                     RedOp op) {
  const DType partial = partial_dtype(dtype);
  std::byte* slot = lane.slot(0);
  // An empty tensor has no memory.
  if (count > 0) copy_bytes(at(slot, index() * count, dtype), buffer, bytes_of(count, dtype));
  on_host_->meet(lane.channel);
  alignas(8) std::byte sum[Hello::kRoom];
  combine_host(lane, [&](int i) { return at(slot, i * count, dtype); }, dtype, op, sum, count);
  greet(lane, sum, bytes_of(count, partial));
  combine_hosts(lane, lane.hellos.front().payload, sizeof(Hello), partial, op, buffer, {dtype},
                count);
}

// A rank combines the parts of the ranks with its index, on all hosts.
void HostsCommunicator::reduce_parts(Lane& lane, const void* send, DType dtype, void* recv,
                                     const Epilogue& epilogue, const Parts& parts, RedOp op,
                                     const Coding* coding) {
  const DType partial = partial_dtype(dtype);
  const Chunks chunks(parts, static_cast<std::int64_t>(lane.block_bytes / itemsize(dtype)));
  const auto part_bytes = [&](std::int64_t chunk) {
    const std::int64_t count = chunks.longest(chunk);
    return coding == nullptr ? bytes_of(count, partial) : coded_bytes(*coding, count);
  };
  const std::vector<const std::byte*> sends = on_host_->readable_sends(lane.channel);
  const auto combine_chunk = [&](std::int64_t chunk, std::byte* sums) {
    if (sends.empty()) return combine_in_stage(lane, send, dtype, op, chunks, chunk, sums);
    combine_where_they_are(lane, sends, dtype, op, chunks, chunk, sums);
  };
  const auto start_chunk = [&](std::int64_t chunk) {
    const auto slot = static_cast<std::size_t>(chunk % kSlots);
    const std::size_t bytes = part_bytes(chunk);
    const std::size_t all = bytes * static_cast<std::size_t>(hosts_);
    std::byte* out = lane.out[slot].of(all);
    if (coding == nullptr) {
      combine_chunk(chunk, out);
    } else {
      std::byte* sums = lane.sums.of(bytes_of(chunks.longest(chunk) * hosts_, partial));
      combine_chunk(chunk, sums);
      code_sums(lane, *coding, chunks, chunk, sums, out, bytes);
    }
    start(lane, chunk, [out, in = lane.in[slot].of(all), bytes](Across& across, int channel) {
      across.all_to_all(channel, out, in, bytes);
    });
  };
  const auto finish_chunk = [&](std::int64_t chunk) {
    finish(lane, chunk);
    const std::int64_t own = chunks.length(rank(), chunk);
    const std::size_t bytes = part_bytes(chunk);
    std::byte* in = lane.in[static_cast<std::size_t>(chunk % kSlots)].data();
    void* to = at(recv, chunks.begin(rank(), chunk) - parts.begin(rank()), epilogue.dtype);
    if (coding == nullptr || !coding->blocks.has_value()) {
      const DType crossed = coding == nullptr ? partial : DType::bf16;
      return combine_hosts(lane, in, bytes, crossed, op, to, epilogue, own);
    }
    std::byte* sums = lane.sums.of(bytes_of(own * hosts_, partial));
    for (int host = 0; host < hosts_; ++host) {
      decode_cpu(*coding->blocks, in + bytes * static_cast<std::size_t>(host),
                 static_cast<std::int64_t>(bytes), {{at(sums, own * host, partial), own, 0}},
                 partial);
    }
    combine_hosts(lane, sums, bytes_of(own, partial), partial, op, to, epilogue, own);
  };

  constexpr std::int64_t kAhead = kSlots - 1;
  const std::int64_t number = chunks.number();
  for (std::int64_t chunk = 0; chunk < number; ++chunk) {
    start_chunk(chunk);
    if (chunk >= kAhead) finish_chunk(chunk - kAhead);
  }
  if (!sends.empty()) on_host_->meet(lane.channel);  // all have read: the senders may overwrite
  for (std::int64_t chunk = std::max<std::int64_t>(0, number - kAhead); chunk < number; ++chunk) {
    finish_chunk(chunk);
  }
  finish_greeting(lane);  // of a call without chunks
}

void HostsCommunicator::combine_where_they_are(Lane& lane,
                                               const std::vector<const std::byte*>& sends,
                                               DType dtype, RedOp op, const Chunks& chunks,
                                               std::int64_t chunk, std::byte* sums) {
  for (int host = 0; host < hosts_; ++host) {
    const int r = rank_at(host, index());
    combine_host(
        lane,
        [&](int i) {
          return at(sends[static_cast<std::size_t>(i)], chunks.begin(r, chunk), dtype);
        },
        dtype, op, at(sums, host * chunks.longest(chunk), partial_dtype(dtype)),
        chunks.length(r, chunk));
  }
}

// Each rank lays what it sends into the stage, in the order of those that take it across:
//
//   for index 0: host 0, host 1, ... | for index 1: host 0, host 1, ... | ...
void HostsCommunicator::combine_in_stage(Lane& lane, const void* send, DType dtype, RedOp op,
                                         const Chunks& chunks, std::int64_t chunk,
                                         std::byte* sums) {
  const std::int64_t each = chunks.longest(chunk);
  std::byte* slot = lane.slot(chunk);
  const auto block = [&](int from, int to, int host) {
    return at(slot, ((from * local_ + to) * hosts_ + host) * each, dtype);
  };
  for (int i = 0; i < local_; ++i) {
    for (int host = 0; host < hosts_; ++host) {
      const int r = rank_at(host, i);
      lane.filler.copy(block(index(), i, host), at(send, chunks.begin(r, chunk), dtype),
                       bytes_of(chunks.length(r, chunk), dtype));
    }
  }
  // All have filled this slot, so all have combined the one before.
  on_host_->meet(lane.channel);
  combine_host(lane, [&](int i) { return block(i, index(), 0); }, dtype, op, sums, each * hosts_);
}

void HostsCommunicator::code_sums(const Lane& lane, const Coding& coding, const Chunks& chunks,
                                  std::int64_t chunk, const std::byte* sums, std::byte* out,
                                  std::size_t bytes) const {
  // The random numbers of a call, a chunk and a rank are nobody else's, up to 2^20 chunks.
  const std::uint64_t call = on_host_->call_of(lane.channel, index()).sequence;
  for (int host = 0; host < hosts_; ++host) {
    const std::int64_t place = (chunk * hosts_ + host) * size() + rank();
    code(coding, reinterpret_cast<const float*>(sums) + host * chunks.longest(chunk),
         chunks.length(rank_at(host, index()), chunk), out + bytes * static_cast<std::size_t>(host),
         bytes, call << 32 | static_cast<std::uint64_t>(place));
  }
}

void HostsCommunicator::combine_hosts(Lane& lane, const std::byte* from, std::size_t stride,
                                      DType partial, RedOp op, void* to, const Epilogue& epilogue,
                                      std::int64_t count) {
  for (int host = 0; host < hosts_; ++host) {
    lane.sources[static_cast<std::size_t>(host)] = from + stride * static_cast<std::size_t>(host);
  }
  reduce_cpu(to, epilogue, lane.sources.data(), hosts_, partial, op, size(), count);
}

}  // namespace shardcomm
