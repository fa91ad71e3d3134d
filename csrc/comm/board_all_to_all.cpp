// What sends something else to each: all_to_all.
#include <algorithm>
#include <numeric>
#include <string>

#include "comm/board_communicator.h"
#include "comm/buffer.h"
#include "shardcomm/tile.h"

namespace shardcomm {
namespace {

// A rank's staging area, here that of rank 0 of three:
//
//   sent to 0 1 2 | received from 0 1 2 | a slot for rank 1 | a slot for rank 2
class Area {
 public:
  explicit Area(int size)
      : size_(size),
        counts_bytes_(round_up(2 * sizeof(std::int64_t) * static_cast<std::size_t>(size), 64)),
        slot_bytes_((ControlMemory::kStageBytes - counts_bytes_) /
                    static_cast<std::size_t>(size - 1) / 64 * 64) {}

  static std::int64_t* sent(std::byte* area) { return reinterpret_cast<std::int64_t*>(area); }
  std::int64_t* received(std::byte* area) const { return sent(area) + size_; }
  std::byte* slot(std::byte* area, int from, int to) const {
    return area + counts_bytes_ +
           static_cast<std::size_t>((to - from + size_) % size_ - 1) * slot_bytes_;
  }
  std::int64_t slot_elements(DType dtype) const {
    return static_cast<std::int64_t>(slot_bytes_ / itemsize(dtype));
  }

 private:
  int size_;
  std::size_t counts_bytes_;
  std::size_t slot_bytes_;
};

}  // namespace

// The ranks' counts go with the call: where all have come, each sees the counts of all, and so all
// take one way.
void BoardCommunicator::run_all_to_all(const void* send, const Parts& send_parts, void* recv,
                                       const Parts& recv_parts, DType dtype, std::int64_t tag,
                                       NativeStream stream) {
  Channel& channel = *gathers_;
  perform(channel, "all_to_all", [&] {
    const auto sent_to = [&](int r) { return at(send, send_parts.begin(r), dtype); };
    const auto received_from = [&](int r) { return at(recv, recv_parts.begin(r), dtype); };
    const auto move_own = [&] {
      copy(received_from(rank_), sent_to(rank_), bytes_of(send_parts.count(rank_), dtype), stream);
    };
    if (size_ == 1) {
      move_own();
      return took(channel, Op::all_to_all, Path::alone);
    }
    Call call;
    call.op = Op::all_to_all;
    call.send_dtype = call.recv_dtype = dtype;
    call.tag = tag;
    const std::size_t bytes = bytes_of(send_parts.total(size_), dtype);
    call.send = windows_->find_own(send, bytes, "all_to_all: send");
    if (bytes == 0) call.send = {Place::kAddress, 0};  // nobody reads there
    windows_->find_own(recv, bytes_of(recv_parts.total(size_), dtype), "all_to_all: recv");

    const Area area(size_);
    const std::int64_t step = area.slot_elements(dtype);
    const auto slot = [&](int from, int to) { return area.slot(stage(channel, from), from, to); };
    const auto left = [&](std::int64_t count, std::int64_t chunk) {
      return bytes_of(std::clamp<std::int64_t>(count - chunk * step, 0, step), dtype);
    };
    const auto fill = [&](std::int64_t chunk) {
      for (int i = 1; i < size_; ++i) {
        const int to = (rank_ + i) % size_;
        executor_->fill(channel.filler, slot(rank_, to), at(sent_to(to), chunk * step, dtype),
                        left(send_parts.count(to), chunk), nullptr);
      }
    };
    const auto use = [&](std::int64_t chunk) {
      for (int i = 1; i < size_; ++i) {  // not all from the same rank at once
        const int from = (rank_ + i) % size_;
        copy(at(received_from(from), chunk * step, dtype), slot(from, rank_),
             left(recv_parts.count(from), chunk), nullptr);
      }
    };

    channel.staging.next();
    for (int r = 0; r < size_; ++r) {
      Area::sent(stage(channel, rank_))[r] = send_parts.count(r);
      area.received(stage(channel, rank_))[r] = recv_parts.count(r);
    }
    call.filled_first = fills_first(call.send, bytes * static_cast<std::size_t>(size_));
    if (call.filled_first) fill(0);
    begin(channel, call, stream);

    std::int64_t longest = 0;
    std::int64_t total = 0;
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        const std::int64_t sent = Area::sent(stage(channel, from))[to];
        const std::int64_t expected = area.received(stage(channel, to))[from];
        if (sent != expected) refuse_counts(channel, from, sent, to, expected);
        if (from != to) longest = std::max(longest, sent);
        total += sent;
      }
    }
    if (!all_filled_first(channel) && all_reachable(channel, &Call::send)) {
      channel.board.start_reading();
      for (int i = 0; i < size_; ++i) {
        const int from = (rank_ + i) % size_;
        const std::int64_t* sent = Area::sent(stage(channel, from));
        const std::int64_t before = std::accumulate(sent, sent + rank_, std::int64_t{0});
        copy(received_from(from), at(peer(channel, &Call::send, from), before, dtype),
             bytes_of(recv_parts.count(from), dtype), stream);
      }
      meet(channel, stream);
      return took(channel, Op::all_to_all, Path::direct);
    }
    move_own();
    run_staged(channel, divide_up(longest, step), fill, use);
    took_staged(channel, Op::all_to_all, bytes_of(total, dtype), Path::staged_not_direct);
  });
}

// All ranks see the same, and all throw.
void BoardCommunicator::refuse_counts(const Channel& channel, int from, std::int64_t sent, int to,
                                      std::int64_t expected) {
  const Call& own = channel.board.call_of(rank_);
  group_.throw_mismatch("ranks gave different counts to " + group_.describe(own) + ": " +
                            group_.who(from) + " sends " + std::to_string(sent) + " elements to " +
                            group_.who(to) + ", which expects " + std::to_string(expected),
                        own);
}

}  // namespace shardcomm
