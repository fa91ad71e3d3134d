// What sends the same to all: all_gather and broadcast.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "comm/board_communicator.h"
#include "comm/buffer.h"
#include "copy/copy_bytes.h"
#include "shardcomm/tile.h"

namespace shardcomm {
namespace {

// Whether each rank's `send` is its own part of the window in which all have `recv`.
bool is_in_place(const Board& board, const Parts& parts, DType recv_dtype, int size) {
  for (int r = 0; r < size; ++r) {
    const Call& call = board.call_of(r);
    if (parts.count(r) == 0) continue;
    const std::size_t before = bytes_of(parts.begin(r), recv_dtype);
    if (!(call.send == Place{call.recv.window, call.recv.offset + before})) return false;
  }
  return true;
}

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
      return took(channel, Op::all_gather, Path::alone);
    }
    Call call;
    call.op = Op::all_gather;
    call.send_dtype = send_dtype;
    call.recv_dtype = recv_dtype;
    call.uneven = !parts.equal();
    call.count = call.uneven ? parts.total(size_) : count;
    call.tag = tag;
    if (count > 0) {
      call.send = windows_->find(send, bytes_of(count, send_dtype), "all_gather: send");
    } else {
      call.send = {Place::kAddress, 0};  // nobody reads there
    }
    const std::size_t bytes = bytes_of(parts.total(size_), recv_dtype);
    call.recv = windows_->find(recv, bytes, "all_gather: recv");

    const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(recv_dtype));
    const auto left = [&](int r, std::int64_t chunk) {
      return std::clamp<std::int64_t>(parts.count(r) - chunk * step, 0, step);
    };
    const auto own_part = [&](std::int64_t chunk) {
      return at(send, std::min(chunk * step, count), send_dtype);
    };
    const auto fill = [&](std::int64_t chunk) {
      const std::int64_t here = left(rank_, chunk);
      if (send_dtype == recv_dtype) {
        return executor_->fill(channel.filler, stage(channel, rank_), own_part(chunk),
                               bytes_of(here, send_dtype), nullptr);
      }
      executor_->convert(stage(channel, rank_), recv_dtype, own_part(chunk), send_dtype, here,
                         nullptr);
    };
    const auto use = [&](std::int64_t chunk) {
      executor_->convert(at(own, chunk * step, recv_dtype), recv_dtype, own_part(chunk), send_dtype,
                         left(rank_, chunk), nullptr);
      for (int r = 0; r < size_; ++r) {
        if (r == rank_ || left(r, chunk) == 0) continue;
        copy_bytes(at(recv, parts.begin(r) + chunk * step, recv_dtype), stage(channel, r),
                   bytes_of(left(r, chunk), recv_dtype));
      }
    };

    // Nobody writes to recv before this: a peer may still read what the window held.
    const bool shared = windows_->is_shared(call.recv);
    begin_staged(channel, call, parts, !shared && fills_first(call.send, bytes), bytes, stream,
                 fill);
    if (have_one_window(channel.index)) {
      if (!is_in_place(channel.board, parts, recv_dtype, size_)) {
        executor_->convert(own, recv_dtype, send, send_dtype, count, stream);
        meet(channel, stream);
      }
      return took(channel, Op::all_gather, Path::window);
    }
    if (!all_filled_first(channel) && all_reachable(channel, &Call::send)) {
      channel.board.start_reading();
      for (int i = 0; i < size_; ++i) {
        const int r = (rank_ + i) % size_;  // not all from the same rank at once
        executor_->convert(at(recv, parts.begin(r), recv_dtype), recv_dtype,
                           peer(channel, &Call::send, r), send_dtype, parts.count(r), stream);
      }
      meet(channel, stream);
      return took(channel, Op::all_gather, Path::direct_not_window);
    }
    run_staged(channel, divide_up(parts.longest(), step), fill, use);
    took_staged(channel, Op::all_gather, bytes, Path::staged_not_window);
  });
}

bool BoardCommunicator::have_one_window(int index) {
  Channel& channel = this->channel(index);
  const Place& place = channel.board.call_of(0).recv;
  bool one_window = place.reachable() && windows(channel).is_shared(place);
  for (int r = 0; r < size_; ++r) one_window &= channel.board.call_of(r).recv == place;
  if (!one_window) refuse_parts_of_one_window(channel);
  return one_window;
}

// Ranks that gather into different parts of a window would write over each other's.
void BoardCommunicator::refuse_parts_of_one_window(Channel& channel) const {
  const Place& own = channel.board.call_of(rank_).recv;
  if (!own.reachable() || !windows(channel).is_shared(own)) return;
  for (int r = 0; r < size_; ++r) {
    const Place& other = channel.board.call_of(r).recv;
    if (other.window != own.window || other == own) continue;
    throw CommError("all_gather: recv begins at byte " + std::to_string(own.offset) +
                        " of communication memory that all ranks share on rank " +
                        std::to_string(group_.number(rank_)) + ", and at byte " +
                        std::to_string(other.offset) + " on rank " +
                        std::to_string(group_.number(r)) + "; it must be one place for all",
                    fault_in(channel.board.call_of(rank_), "mismatch"));
  }
}

void BoardCommunicator::run_broadcast(void* buffer, DType dtype, std::int64_t count, int root,
                                      NativeStream stream) {
  Channel& channel = *gathers_;
  perform(channel, "broadcast", [&] {
    if (size_ == 1) return took(channel, Op::broadcast, Path::alone);
    const std::size_t bytes = bytes_of(count, dtype);
    Call call;
    call.op = Op::broadcast;
    call.send_dtype = call.recv_dtype = dtype;
    call.root = root;
    call.count = count;
    call.send = windows_->find(buffer, bytes, "broadcast: buffer");
    const Place own = call.send;
    const bool shared = count > 0 && windows_->is_shared(own);
    if (bytes <= PostedCall::kElementBytes && executor_->on_host()) {
      broadcast_few(channel, call, shared, buffer, bytes);
      return took(channel, Op::broadcast, Path::inlined);
    }
    const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype));
    const auto part = [&](std::int64_t chunk) { return at(buffer, chunk * step, dtype); };
    const auto length = [&](std::int64_t chunk) {
      return bytes_of(std::min(step, count - chunk * step), dtype);
    };
    const auto fill = [&](std::int64_t chunk) {
      if (rank_ != root) return;
      executor_->fill(channel.filler, stage(channel, root), part(chunk), length(chunk), nullptr);
    };
    const auto use = [&](std::int64_t chunk) {
      if (rank_ == root || shared) return;
      copy_bytes(part(chunk), stage(channel, root), length(chunk));
    };
    begin_staged(channel, call, bytes, rank_ != root || fills_first(call.send, bytes), bytes,
                 stream, fill);
    if (shared) require_buffer_of(channel, root, own);
    if (!all_filled_first(channel) && channel.board.call_of(root).send.reachable()) {
      channel.board.start_reading();
      const std::byte* source = peer(channel, &Call::send, root);
      if (source != buffer) executor_->copy(buffer, source, bytes, stream);
      meet(channel, stream);
      return took(channel, Op::broadcast, Path::direct);
    }
    run_staged(channel, divide_up(count, step), fill, use);
    took_staged(channel, Op::broadcast, bytes, Path::staged_not_direct);
  });
}

// What lies beside the root's call. The root goes on at once.
void BoardCommunicator::broadcast_few(Channel& channel, Call& call, bool shared, void* buffer,
                                      std::size_t bytes) {
  const Place own = call.send;
  if (!shared) call.send = {};  // one cache line tells all that is left
  std::byte* few = channel.board.elements(call.root);
  if (rank_ == call.root) copy(few, buffer, bytes, nullptr);
  channel.board.begin_from_root(call);
  if (rank_ == call.root) return;
  if (shared) return require_buffer_of(channel, call.root, own);
  copy(buffer, few, bytes, nullptr);
}

bool BoardCommunicator::have_one_buffer(int index) {
  Channel& channel = this->channel(index);
  const Call& call = channel.board.call_of(rank_);
  if (call.count == 0 || !windows(channel).is_shared(call.send)) return false;
  for (int r = 0; r < size_; ++r) require_buffer_of(channel, r, call.send);
  return true;
}

// A rank that copies into memory of all ranks after its last meeting may overwrite what others have
// written there since. So none copies: where the buffer is the root's, the root's value is there.
void BoardCommunicator::require_buffer_of(Channel& channel, int rank, const Place& own) {
  const Call& call = channel.board.call_of(rank);
  if (call.send == own) return;
  group_.throw_mismatch("broadcast: buffer begins at byte " + std::to_string(own.offset) +
                            " of communication memory that all ranks share on rank " +
                            std::to_string(group_.number(rank_)) + ", and elsewhere on rank " +
                            std::to_string(group_.number(rank)) +
                            "; it must be one place for all, or memory that ranks do not share",
                        call);
}

}  // namespace shardcomm
