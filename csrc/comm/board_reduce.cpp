// What combines the ranks' values: reduce_scatter and all_reduce.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/board_communicator.h"
#include "comm/buffer.h"

namespace shardcomm {
namespace {

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

// Where `data` is for peers. In the one region that all ranks share, none has a value of its own.
Place find_own(const WindowTable& windows, const void* data, std::size_t bytes, const char* name) {
  const Place place = windows.find(data, bytes, name);
  if (windows.is_shared(place)) {
    throw std::invalid_argument(std::string(name) +
                                " is in communication memory that all ranks share (allocate for "
                                "use 'gather'); it must be a rank's own: allocate it for use "
                                "'reduce', or as any other memory");
  }
  return place;
}

}  // namespace

void BoardCommunicator::run_reduce_scatter(const void* send, DType dtype, void* recv,
                                           const Epilogue& epilogue, const Parts& parts, RedOp op,
                                           std::int64_t tag, NativeStream stream) {
  const std::int64_t count = parts.count(rank_);
  Channel& channel = *reduces_;
  perform(channel, "reduce_scatter", [&] {
    if (size_ == 1) {
      executor_->reduce(recv, epilogue, &send, 1, dtype, op, count, stream);
      return took(channel, Op::reduce_scatter, "alone", "alone");
    }
    Call call;
    call.op = Op::reduce_scatter;
    call.send_dtype = call.recv_dtype = dtype;
    call.red_op = op;
    call.uneven = !parts.equal();
    call.count = call.uneven ? parts.total(size_) : count;
    call.tag = tag;
    call.send = find_own(*windows_->now(), send, bytes_of(parts.total(size_), dtype),
                         "reduce_scatter: send");
    find_own(*windows_->now(), recv, bytes_of(count, epilogue.dtype), "reduce_scatter: recv");
    begin(channel, call, parts, stream);
    if (!all_reachable(channel, &Call::send)) {
      reduce_staged(channel, send, dtype, recv, epilogue, parts, op);
      return took(channel, Op::reduce_scatter, "direct", "staged", kPrivate);
    }
    std::vector<const void*> sources;
    for (int r = 0; r < size_; ++r) {
      sources.push_back(at(peer(channel, &Call::send, r), parts.begin(rank_), dtype));
    }
    executor_->reduce(recv, epilogue, sources.data(), size_, dtype, op, count, stream);
    meet(channel, stream);  // all have read: the senders may overwrite
    took(channel, Op::reduce_scatter, "direct", "direct");
  });
}

// Each chunk holds the same fraction of every rank's part, so that all have something to reduce
// between any two meetings.
void BoardCommunicator::reduce_staged(Channel& channel, const void* send, DType dtype, void* recv,
                                      const Epilogue& epilogue, const Parts& parts, RedOp op) {
  const auto room = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype));
  const auto divide_up = [](std::int64_t n, std::int64_t chunks) {
    return (n + chunks - 1) / chunks;
  };
  std::int64_t chunks = divide_up(parts.total(size_), room);
  std::vector<std::int64_t> starts(static_cast<std::size_t>(size_) + 1);  // of slices in a chunk
  const auto step = [&](int r) { return divide_up(parts.count(r), chunks); };
  for (; chunks > 0; ++chunks) {
    for (int r = 0; r < size_; ++r) starts[index(r) + 1] = starts[index(r)] + step(r);
    if (starts.back() <= room) break;  // else roundings were too many
  }
  for (std::int64_t i = 0; i < chunks; ++i) {
    const auto done = [&](int r) { return std::min(i * step(r), parts.count(r)); };
    const auto left = [&](int r) { return std::min(step(r), parts.count(r) - done(r)); };
    const std::int64_t chunk = channel.chunks_staged++;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || left(r) == 0) continue;  // its own slice no other rank reads
      std::memcpy(at(stage(channel, rank_, chunk), starts[index(r)], dtype),
                  at(send, parts.begin(r) + done(r), dtype), bytes_of(left(r), dtype));
    }
    channel.board.meet();
    std::vector<const void*> sources;
    for (int r = 0; r < size_; ++r) {
      sources.push_back(r == rank_ ? at(send, parts.begin(rank_) + done(rank_), dtype)
                                   : at(stage(channel, r, chunk), starts[index(rank_)], dtype));
    }
    executor_->reduce(at(recv, done(rank_), epilogue.dtype), epilogue, sources.data(), size_, dtype,
                      op, left(rank_), nullptr);
  }
}

void BoardCommunicator::run_all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op,
                                       std::int64_t tag, NativeStream stream) {
  Channel& channel = *reduces_;
  perform(channel, "all_reduce", [&] {
    if (size_ == 1) return took(channel, Op::all_reduce, "alone", "alone");
    Call call;
    call.op = Op::all_reduce;
    call.send_dtype = call.recv_dtype = dtype;
    call.red_op = op;
    call.count = count;
    call.tag = tag;
    call.send = find_own(*windows_->now(), buffer, bytes_of(count, dtype), "all_reduce: buffer");
    begin(channel, call, stream);
    if (all_reachable(channel, &Call::send)) {
      all_reduce_direct(channel, static_cast<std::byte*>(buffer), dtype, count, op, stream);
      took(channel, Op::all_reduce, "direct", "direct");
    } else {
      all_reduce_staged(channel, static_cast<std::byte*>(buffer), dtype, count, op);
      took(channel, Op::all_reduce, "direct", "staged", kPrivate);
    }
  });
}

// Rank r reduces slice r of all buffers into its own, which no other rank reads in that phase; then
// all copy.
void BoardCommunicator::all_reduce_direct(Channel& channel, std::byte* buffer, DType dtype,
                                          std::int64_t count, RedOp op, NativeStream stream) {
  const std::int64_t slice = (count + size_ - 1) / size_;
  const auto first = [&](int r) { return std::min(r * slice, count); };
  const auto length = [&](int r) { return first(r + 1) - first(r); };
  std::vector<const void*> sources;
  for (int r = 0; r < size_; ++r) {
    sources.push_back(at(peer(channel, &Call::send, r), first(rank_), dtype));
  }
  executor_->reduce(at(buffer, first(rank_), dtype), {dtype}, sources.data(), size_, dtype, op,
                    length(rank_), stream);
  meet(channel, stream);
  for (int i = 1; i < size_; ++i) {
    const int r = (rank_ + i) % size_;
    executor_->copy(at(buffer, first(r), dtype), at(peer(channel, &Call::send, r), first(r), dtype),
                    bytes_of(length(r), dtype), stream);
  }
  meet(channel, stream);
}

// Every rank reduces all of it: few bytes, and one meeting a chunk instead of two.
void BoardCommunicator::all_reduce_staged(Channel& channel, std::byte* buffer, DType dtype,
                                          std::int64_t count, RedOp op) {
  const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype));
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t n = std::min(step, count - done);
    const std::int64_t chunk = channel.chunks_staged++;
    std::memcpy(stage(channel, rank_, chunk), at(buffer, done, dtype), bytes_of(n, dtype));
    channel.board.meet();
    std::vector<const void*> sources;
    for (int r = 0; r < size_; ++r) sources.push_back(stage(channel, r, chunk));
    executor_->reduce(at(buffer, done, dtype), {dtype}, sources.data(), size_, dtype, op, n,
                      nullptr);
  }
}

}  // namespace shardcomm
