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

void BoardCommunicator::all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                                   std::int64_t count, std::int64_t tag, NativeStream stream) {
  check_all_gather(send, send_dtype, recv, recv_dtype, count, rank_, size_);
  Channel& channel = *gathers_;
  perform(channel, "all_gather", [&] {
    std::byte* own = at(recv, rank_ * count, recv_dtype);
    if (size_ == 1) {
      executor_->convert(own, recv_dtype, send, send_dtype, count, stream);
      return took(channel, Op::all_gather, "alone", "alone");
    }
    Call call;
    call.op = Op::all_gather;
    call.send_dtype = send_dtype;
    call.recv_dtype = recv_dtype;
    call.count = count;
    call.tag = tag;
    const auto windows = windows_->now();
    call.send = windows->find(send, bytes_of(count, send_dtype), "all_gather: send");
    call.recv = windows->find(recv, bytes_of(count * size_, recv_dtype), "all_gather: recv");
    // Nobody writes before this: a peer may still read what the window held.
    begin(channel, call, stream);

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
        executor_->convert(at(recv, r * count, recv_dtype), recv_dtype,
                           peer(channel, &Call::send, r), send_dtype, count, stream);
      }
      meet(channel, stream);
      return took(channel, Op::all_gather, "window", "direct", kNotWindow);
    }
    gather_staged(channel, send, send_dtype, recv, recv_dtype, count);
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
                    " on rank " + std::to_string(r) + "; it must be one place for all");
  }
}

void BoardCommunicator::gather_staged(Channel& channel, const void* send, DType send_dtype,
                                      void* recv, DType recv_dtype, std::int64_t count) {
  const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(recv_dtype));
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t n = std::min(step, count - done);
    const std::int64_t chunk = channel.chunks_staged++;
    executor_->convert(stage(channel, rank_, chunk), recv_dtype, at(send, done, send_dtype),
                       send_dtype, n, nullptr);
    // All have filled this half, so all have emptied the other, which the next chunk fills.
    channel.board.meet();
    executor_->convert(at(recv, rank_ * count + done, recv_dtype), recv_dtype,
                       at(send, done, send_dtype), send_dtype, n, nullptr);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      std::memcpy(at(recv, r * count + done, recv_dtype), stage(channel, r, chunk),
                  bytes_of(n, recv_dtype));
    }
  }
}

void BoardCommunicator::broadcast(void* buffer, std::size_t bytes, int root, NativeStream stream) {
  check_buffer("broadcast", "buffer", buffer, static_cast<std::int64_t>(bytes));
  if (root < 0 || root >= size_) {
    throw std::invalid_argument("broadcast: root is " + std::to_string(root) +
                                "; it must be a rank, 0 to " + std::to_string(size_ - 1));
  }
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
