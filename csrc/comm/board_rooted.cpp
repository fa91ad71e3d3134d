// What moves between one rank, the root, and all others: gather and scatter. (broadcast is beside
// all_gather, and reduce beside all_reduce.)
#include <algorithm>

#include "comm/board_communicator.h"
#include "comm/buffer.h"
#include "shardcomm/tile.h"

namespace shardcomm {

void BoardCommunicator::run_gather(const void* send, void* recv, DType dtype, std::int64_t count,
                                   int root, std::int64_t tag, NativeStream stream) {
  Channel& channel = *gathers_;
  perform(channel, "gather", [&] {
    const std::size_t bytes = bytes_of(count, dtype);
    const auto part = [&](int r) { return at(recv, r * count, dtype); };  // on the root
    if (size_ == 1) {
      copy(recv, send, bytes, stream);
      return took(channel, Op::gather, Path::alone);
    }
    const bool is_root = rank_ == root;
    const std::size_t total = bytes * static_cast<std::size_t>(size_);
    Call call;
    call.op = Op::gather;
    call.send_dtype = call.recv_dtype = dtype;
    call.root = root;
    call.count = count;
    call.tag = tag;
    call.send = windows_->find(send, bytes, "gather: send");
    if (is_root) {
      windows_->find_own(recv, total, "gather: recv");
      call.send = {Place::kAddress, 0};  // no other rank reads there
    }
    const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype));
    const auto length = [&](std::int64_t chunk) {
      return bytes_of(std::min(step, count - chunk * step), dtype);
    };
    const auto fill = [&](std::int64_t chunk) {
      if (is_root) return;
      executor_->fill(channel.filler, stage(channel, rank_), at(send, chunk * step, dtype),
                      length(chunk), nullptr);
    };
    const auto use = [&](std::int64_t chunk) {
      for (int r = 0; is_root && r < size_; ++r) {
        if (r == root) continue;
        copy(at(part(r), chunk * step, dtype), stage(channel, r), length(chunk), nullptr);
      }
    };
    begin_staged(channel, call, count, is_root || fills_first(call.send, total), total, stream,
                 fill);
    if (is_root) copy(part(root), send, bytes, stream);
    if (!all_filled_first(channel) && all_reachable(channel, &Call::send)) {
      channel.board.start_reading();
      for (int r = 0; is_root && r < size_; ++r) {
        if (r != root) copy(part(r), peer(channel, &Call::send, r), bytes, stream);
      }
      meet(channel, stream);
      return took(channel, Op::gather, Path::direct);
    }
    run_staged(channel, divide_up(count, step), fill, use);
    took_staged(channel, Op::gather, total, Path::staged_not_direct);
  });
}

void BoardCommunicator::run_scatter(const void* send, void* recv, DType dtype, std::int64_t count,
                                    int root, std::int64_t tag, NativeStream stream) {
  Channel& channel = *gathers_;
  perform(channel, "scatter", [&] {
    const std::size_t bytes = bytes_of(count, dtype);
    const auto part = [&](int r) { return at(send, r * count, dtype); };  // on the root
    if (size_ == 1) {
      copy(recv, send, bytes, stream);
      return took(channel, Op::scatter, Path::alone);
    }
    const bool is_root = rank_ == root;
    const std::size_t total = bytes * static_cast<std::size_t>(size_);
    Call call;
    call.op = Op::scatter;
    call.send_dtype = call.recv_dtype = dtype;
    call.root = root;
    call.count = count;
    call.tag = tag;
    if (is_root) call.send = windows_->find(send, total, "scatter: send");
    windows_->find_own(recv, bytes, "scatter: recv");

    // The root's area has a slot for each rank.
    const std::size_t slot_bytes =
        ControlMemory::kStageBytes / static_cast<std::size_t>(size_) / 64 * 64;
    const auto step = static_cast<std::int64_t>(slot_bytes / itemsize(dtype));
    const auto length = [&](std::int64_t chunk) {
      return bytes_of(std::min(step, count - chunk * step), dtype);
    };
    const auto slot = [&](int r) {
      return at(stage(channel, root), r * std::min(step, count), dtype);
    };
    const auto fill = [&](std::int64_t chunk) {
      for (int r = 0; is_root && r < size_; ++r) {
        if (r == root) continue;
        executor_->fill(channel.filler, slot(r), at(part(r), chunk * step, dtype), length(chunk),
                        nullptr);
      }
    };
    const auto use = [&](std::int64_t chunk) {
      if (is_root) return;
      copy(at(recv, chunk * step, dtype), slot(rank_), length(chunk), nullptr);
    };
    begin_staged(channel, call, count, !is_root || fills_first(call.send, total), total, stream,
                 fill);
    if (is_root) copy(recv, part(root), bytes, stream);
    if (!all_filled_first(channel) && channel.board.call_of(root).send.reachable()) {
      channel.board.start_reading();
      if (!is_root) {
        const std::byte* all = peer(channel, &Call::send, root);
        copy(recv, at(all, rank_ * count, dtype), bytes, stream);
      }
      meet(channel, stream);
      return took(channel, Op::scatter, Path::direct);
    }
    run_staged(channel, divide_up(count, step), fill, use);
    took_staged(channel, Op::scatter, total, Path::staged_not_direct);
  });
}

}  // namespace shardcomm
