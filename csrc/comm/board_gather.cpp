// What sends the same to all: all_gather and broadcast.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "comm/board_communicator.h"
#include "comm/buffer.h"

namespace shardcomm {
namespace {

constexpr const char* kNotWindow =
    "recv is not communication memory that all ranks share (allocate for use 'gather') at one "
    "place";

}  // namespace

void BoardCommunicator::run_all_gather(const void* send, DType send_dtype, void* recv,
                                       DType recv_dtype, const Parts& parts, std::int64_t tag,
                                       NativeStream stream) {
  Channel& channel = *gathers_;
  perform(channel, "all_gather", [&] {
    std::byte* own = at(recv, parts.begin(rank_), recv_dtype);
    const std::int64_t count = parts.count(rank_);
    if (size_ == 1) {
      executor_->convert(own, recv_dtype, send, send_dtype, count, stream);
      return took(channel, Op::all_gather, "alone", "alone");
    }
    Call call;
    call.op = Op::all_gather;
    call.send_dtype = send_dtype;
    call.recv_dtype = recv_dtype;
    call.uneven = !parts.equal();
    call.count = call.uneven ? parts.total(size_) : count;
    call.tag = tag;
    const auto windows = windows_->now();
    if (count > 0) {
      call.send = windows->find(send, bytes_of(count, send_dtype), "all_gather: send");
    } else {
      call.send = {Place::kAddress, 0};  // nobody reads there
    }
    call.recv = windows->find(recv, bytes_of(parts.total(size_), recv_dtype), "all_gather: recv");
    // Nobody writes before this: a peer may still read what the window held.
    begin(channel, call, parts, stream);

    const Place& place = channel.board.call_of(0).recv;
    bool one_window = channel.windows->is_shared(place);
    for (int r = 0; r < size_; ++r) one_window &= channel.board.call_of(r).recv == place;
    if (!one_window) refuse_parts_of_one_window(channel);
    if (one_window) {
      executor_->convert(own, recv_dtype, send, send_dtype, count, stream);
      meet(channel, stream);
      return took(channel, Op::all_gather, "window", "window");
    }
    if (all_reachable(channel, &Call::send)) {
      for (int i = 0; i < size_; ++i) {
        const int r = (rank_ + i) % size_;  // not all from the same rank at once
        executor_->convert(at(recv, parts.begin(r), recv_dtype), recv_dtype,
                           peer(channel, &Call::send, r), send_dtype, parts.count(r), stream);
      }
      meet(channel, stream);
      return took(channel, Op::all_gather, "window", "direct", kNotWindow);
    }
    gather_staged(channel, send, send_dtype, recv, recv_dtype, parts);
    took(channel, Op::all_gather, "window", "staged", kNotWindow);
  });
}

// Ranks that gather into different parts of a window would write over each other's.
void BoardCommunicator::refuse_parts_of_one_window(Channel& channel) const {
  const Place& own = channel.board.call_of(rank_).recv;
  if (!channel.windows->is_shared(own)) return;
  for (int r = 0; r < size_; ++r) {
    const Place& other = channel.board.call_of(r).recv;
    if (other.window != own.window || other == own) continue;
    throw CommError("all_gather: recv begins at byte " + std::to_string(own.offset) +
                        " of communication memory that all ranks share on rank " +
                        std::to_string(rank_) + ", and at byte " + std::to_string(other.offset) +
                        " on rank " + std::to_string(r) + "; it must be one place for all",
                    fault_in(channel.board.call_of(rank_), "mismatch"));
  }
}

void BoardCommunicator::gather_staged(Channel& channel, const void* send, DType send_dtype,
                                      void* recv, DType recv_dtype, const Parts& parts) {
  const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(recv_dtype));
  for (std::int64_t done = 0; done < parts.longest(); done += step) {
    const auto left = [&](int r) {
      return std::clamp<std::int64_t>(parts.count(r) - done, 0, step);
    };
    const std::int64_t chunk = channel.chunks_staged++;
    const void* own = at(send, std::min(done, parts.count(rank_)), send_dtype);
    executor_->convert(stage(channel, rank_, chunk), recv_dtype, own, send_dtype, left(rank_),
                       nullptr);
    // All have filled this half, so all have emptied the other, which the next chunk fills.
    channel.board.meet();
    executor_->convert(at(recv, parts.begin(rank_) + done, recv_dtype), recv_dtype, own, send_dtype,
                       left(rank_), nullptr);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || left(r) == 0) continue;
      std::memcpy(at(recv, parts.begin(r) + done, recv_dtype), stage(channel, r, chunk),
                  bytes_of(left(r), recv_dtype));
    }
  }
}

void BoardCommunicator::run_broadcast(void* buffer, std::size_t bytes, int root,
                                      NativeStream stream) {
  Channel& channel = *gathers_;
  perform(channel, "broadcast", [&] {
    if (size_ == 1) return took(channel, Op::broadcast, "alone", "alone");
    Call call;
    call.op = Op::broadcast;
    call.root = root;
    call.count = static_cast<std::int64_t>(bytes);
    call.send = windows_->now()->find(buffer, bytes, "broadcast: buffer");
    begin(channel, call, stream);
    if (channel.board.call_of(root).send.reachable()) {
      const std::byte* source = peer(channel, &Call::send, root);
      if (source != buffer) executor_->copy(buffer, source, bytes, stream);
      meet(channel, stream);
      return took(channel, Op::broadcast, "direct", "direct");
    }
    for (std::size_t done = 0; done < bytes; done += ControlMemory::kStageBytes) {
      const std::size_t n = std::min(ControlMemory::kStageBytes, bytes - done);
      std::byte* part = static_cast<std::byte*>(buffer) + done;
      const std::int64_t chunk = channel.chunks_staged++;
      if (rank_ == root) std::memcpy(stage(channel, root, chunk), part, n);
      channel.board.meet();
      if (rank_ != root) std::memcpy(part, stage(channel, root, chunk), n);
    }
    took(channel, Op::broadcast, "direct", "staged", kPrivate);
  });
}

}  // namespace shardcomm
