// What combines the ranks' values: reduce_scatter, all_reduce and reduce.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "comm/board_communicator.h"
#include "comm/buffer.h"
#include "copy/copy_bytes.h"
#include "shardcomm/tile.h"

namespace shardcomm {
namespace {

// How every rank's part of a reduce-scatter is cut into chunks. Each chunk holds the same fraction
// of every part, so that all ranks have something to reduce between any two meetings.
class Slices {
 public:
  // `room`: the elements of a chunk, at most.
  Slices(const Parts& parts, int size, std::int64_t room)
      : parts_(parts), chunks_(parts.total(size) <= room ? 1 : divide_up(parts.total(size), room)) {
    while (start(size) > room) ++chunks_;  // roundings were too many
  }

  std::int64_t chunks() const { return chunks_; }
  // Where the slice of rank `r` starts in a chunk.
  std::int64_t start(int r) const {
    if (parts_.equal()) return r * step(0);
    std::int64_t sum = 0;
    for (int i = 0; i < r; ++i) sum += step(i);
    return sum;
  }
  // How many elements of the rank's part come before the chunk, and how many are in it.
  std::int64_t before(int r, std::int64_t chunk) const {
    return std::min(chunk * step(r), parts_.count(r));
  }
  std::int64_t length(int r, std::int64_t chunk) const {
    return std::min(step(r), parts_.count(r) - before(r, chunk));
  }

 private:
  // Divisions would be a tenth of a small reduce-scatter's time.
  std::int64_t step(int r) const {
    return chunks_ == 1 ? parts_.count(r) : divide_up(parts_.count(r), chunks_);
  }

  const Parts& parts_;
  std::int64_t chunks_;
};

// What is reduced is copied while it is in the nearest caches.
constexpr std::size_t kPieceBytes = 64 * 1024;
static_assert(kPieceBytes <= ControlMemory::kStageBytes);

// Calls reduce(elements before a piece, its elements) for each piece of `count` elements.
template <class Reduce>
void in_pieces(DType dtype, std::int64_t count, Reduce&& reduce) {
  const auto piece = static_cast<std::int64_t>(kPieceBytes / itemsize(dtype));
  for (std::int64_t done = 0; done < count; done += piece) {
    reduce(done, std::min(piece, count - done));
  }
}

// Which of `count` elements each rank reduces for all.
class Shares {
 public:
  Shares(std::int64_t count, int size) : count_(count), longest_(divide_up(count, size)) {}
  std::int64_t begin(int r) const { return std::min(r * longest_, count_); }
  std::int64_t length(int r) const { return begin(r + 1) - begin(r); }

 private:
  std::int64_t count_;
  std::int64_t longest_;
};

}  // namespace

void BoardCommunicator::run_reduce_scatter(const void* send, DType dtype, void* recv,
                                           const Epilogue& epilogue, const Parts& parts,
                                           RedOp called, std::int64_t tag, NativeStream stream) {
  const std::int64_t count = parts.count(rank_);
  Channel& channel = *reduces_;
  const RedOp op = posted(called);
  executor_->check_reduction(dtype, op);
  perform(channel, "reduce_scatter", [&] {
    if (size_ == 1) {
      executor_->reduce(recv, epilogue, &send, 1, dtype, op, count, stream);
      return took(channel, Op::reduce_scatter, Path::alone);
    }
    Call call;
    call.op = Op::reduce_scatter;
    call.send_dtype = call.recv_dtype = dtype;
    call.red_op = op;
    call.uneven = !parts.equal();
    call.count = call.uneven ? parts.total(size_) : count;
    call.tag = tag;
    const std::size_t bytes = bytes_of(parts.total(size_), dtype);
    call.send = windows_->find_own(send, bytes, "reduce_scatter: send");
    windows_->find_own(recv, bytes_of(count, epilogue.dtype), "reduce_scatter: recv");

    const Slices slices(parts, size_,
                        static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype)));
    const auto own_slice = [&](int r, std::int64_t chunk) {
      return at(send, parts.begin(r) + slices.before(r, chunk), dtype);
    };
    const auto fill = [&](std::int64_t chunk) {
      for (int r = 0; r < size_; ++r) {
        const std::int64_t length = slices.length(r, chunk);
        if (r == rank_ || length == 0) continue;  // its own slice no other rank reads
        executor_->fill(channel.filler, at(stage(channel, rank_), slices.start(r), dtype),
                        own_slice(r, chunk), bytes_of(length, dtype), nullptr);
      }
    };
    const auto use = [&](std::int64_t chunk) {
      const auto* from = sources(channel, [&](int r) -> const void* {
        if (r == rank_) return own_slice(rank_, chunk);
        return at(stage(channel, r), slices.start(rank_), dtype);
      });
      executor_->reduce(at(recv, slices.before(rank_, chunk), epilogue.dtype), epilogue, from,
                        size_, dtype, op, slices.length(rank_, chunk), nullptr);
    };

    begin_staged(channel, call, parts, fills_first(call.send, bytes), bytes, stream, fill);
    if (!all_filled_first(channel) && all_reachable(channel, &Call::send)) {
      channel.board.start_reading();
      const auto* from = sources(channel, [&](int r) {
        return at(peer(channel, &Call::send, r), parts.begin(rank_), dtype);
      });
      executor_->reduce(recv, epilogue, from, size_, dtype, op, count, stream);
      meet(channel, stream);  // all have read: the senders may overwrite
      return took(channel, Op::reduce_scatter, Path::direct);
    }
    run_staged(channel, slices.chunks(), fill, use);
    took_staged(channel, Op::reduce_scatter, bytes, Path::staged_not_direct);
  });
}

void BoardCommunicator::run_all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp called,
                                       std::int64_t tag, NativeStream stream) {
  Channel& channel = *reduces_;
  const RedOp op = posted(called);
  executor_->check_reduction(dtype, op);
  perform(channel, "all_reduce", [&] {
    if (size_ == 1) return took(channel, Op::all_reduce, Path::alone);
    Call call;
    call.op = Op::all_reduce;
    call.send_dtype = call.recv_dtype = dtype;
    call.red_op = op;
    call.count = count;
    call.tag = tag;
    const std::size_t bytes = bytes_of(count, dtype);
    call.send = windows_->find_own(buffer, bytes, "all_reduce: buffer");

    // Of few bytes every rank reduces all. Of more, each reduces its share of a chunk for all.
    const bool is_few = bytes <= ControlMemory::kInlineBytes;
    const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype));
    const auto part = [&](std::int64_t chunk) { return at(buffer, chunk * step, dtype); };
    const auto length = [&](std::int64_t chunk) { return std::min(step, count - chunk * step); };
    const auto fill = [&](std::int64_t chunk) {
      if (!is_few) return fill_others_shares(channel, part(chunk), dtype, length(chunk));
      executor_->fill(channel.filler, stage(channel, rank_), part(chunk),
                      bytes_of(length(chunk), dtype), nullptr);
    };
    const auto use = [&](std::int64_t chunk) {
      if (!is_few) return all_reduce_shares(channel, part(chunk), dtype, length(chunk), op);
      const auto* from = sources(channel, [&](int r) -> const void* {
        return r == rank_ ? part(chunk) : stage(channel, r);
      });
      executor_->reduce(part(chunk), {dtype}, from, size_, dtype, op, length(chunk), nullptr);
    };

    begin_staged(channel, call, count, fills_first(call.send, bytes), bytes, stream, fill);
    if (!all_filled_first(channel) && all_reachable(channel, &Call::send)) {
      channel.board.start_reading();
      all_reduce_direct(channel, static_cast<std::byte*>(buffer), dtype, count, op, stream);
      return took(channel, Op::all_reduce, Path::direct);
    }
    run_staged(channel, divide_up(count, step), fill, use);
    took_staged(channel, Op::all_reduce, bytes, Path::staged_not_direct);
  });
}

// Rank r reduces share r of all buffers into its own, which no other rank reads in that phase; then
// all copy. Other ranks' cores hold the lines of all that is written, so that it is filled as areas
// are: on a host by pieces, which are reduced beside it first.
void BoardCommunicator::all_reduce_direct(Channel& channel, std::byte* buffer, DType dtype,
                                          std::int64_t count, RedOp op, NativeStream stream) {
  const Shares shares(count, size_);
  const auto reduce = [&](void* to, std::int64_t done, std::int64_t n) {
    const auto* from = sources(channel, [&](int r) {
      return at(peer(channel, &Call::send, r), shares.begin(rank_) + done, dtype);
    });
    executor_->reduce(to, {dtype}, from, size_, dtype, op, n, stream);
  };
  const auto own = [&](std::int64_t done) { return at(buffer, shares.begin(rank_) + done, dtype); };
  if (executor_->on_host()) {
    std::byte* piece = stage(channel, rank_);  // which no other rank reads in this call
    in_pieces(dtype, shares.length(rank_), [&](std::int64_t done, std::int64_t n) {
      reduce(piece, done, n);
      executor_->fill(channel.filler, own(done), piece, bytes_of(n, dtype), nullptr);
    });
  } else {
    reduce(own(0), 0, shares.length(rank_));
  }
  meet(channel, stream);
  for (int i = 1; i < size_; ++i) {
    const int r = (rank_ + i) % size_;
    executor_->fill(channel.filler, at(buffer, shares.begin(r), dtype),
                    at(peer(channel, &Call::send, r), shares.begin(r), dtype),
                    bytes_of(shares.length(r), dtype), stream);
  }
  meet(channel, stream);
}

// The same of a chunk through the staging areas. A rank does not fill its own share of its area,
// which no other rank reads before the result is there.
void BoardCommunicator::fill_others_shares(Channel& channel, const std::byte* chunk, DType dtype,
                                           std::int64_t count) {
  const Shares shares(count, size_);
  std::byte* area = stage(channel, rank_);
  const std::size_t begin = bytes_of(shares.begin(rank_), dtype);
  const std::size_t end = bytes_of(shares.begin(rank_ + 1), dtype);
  executor_->fill(channel.filler, area, chunk, begin, nullptr);
  executor_->fill(channel.filler, area + end, chunk + end, bytes_of(count, dtype) - end, nullptr);
}

void BoardCommunicator::all_reduce_shares(Channel& channel, std::byte* chunk, DType dtype,
                                          std::int64_t count, RedOp op) {
  const Shares shares(count, size_);
  const auto staged = [&](int r, int share) {
    return at(stage(channel, r), shares.begin(share), dtype);
  };
  const auto reduce = [&] {
    in_pieces(dtype, shares.length(rank_), [&](std::int64_t done, std::int64_t n) {
      std::byte* own = at(chunk, shares.begin(rank_) + done, dtype);
      const auto* from = sources(channel, [&](int r) -> const void* {
        return r == rank_ ? own : at(staged(r, rank_), done, dtype);
      });
      executor_->reduce(own, {dtype}, from, size_, dtype, op, n, nullptr);
      executor_->fill(channel.filler, at(staged(rank_, rank_), done, dtype), own,
                      bytes_of(n, dtype), nullptr);
    });
  };
  const auto copy_others = [&] {
    for (int i = 1; i < size_; ++i) {
      const int r = (rank_ + i) % size_;
      copy(at(chunk, shares.begin(r), dtype), staged(r, r), bytes_of(shares.length(r), dtype),
           nullptr);
    }
  };
  channel.staging.share(reduce, copy_others);
}

void BoardCommunicator::run_reduce(const void* send, void* recv, DType dtype, std::int64_t count,
                                   RedOp called, int root, std::int64_t tag, NativeStream stream) {
  Channel& channel = *reduces_;
  const RedOp op = posted(called);
  executor_->check_reduction(dtype, op);
  perform(channel, "reduce", [&] {
    const std::size_t bytes = bytes_of(count, dtype);
    if (size_ == 1) {
      copy(recv, send, bytes, stream);
      return took(channel, Op::reduce, Path::alone);
    }
    const bool is_root = rank_ == root;
    Call call;
    call.op = Op::reduce;
    call.send_dtype = call.recv_dtype = dtype;
    call.red_op = op;
    call.root = root;
    call.count = count;
    call.tag = tag;
    call.send = windows_->find_own(send, bytes, "reduce: send");
    if (is_root) {
      windows_->find_own(recv, bytes, "reduce: recv");
      call.send = {Place::kAddress, 0};  // no other rank reads there
    }

    const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype));
    const auto part = [&](std::int64_t chunk) { return at(send, chunk * step, dtype); };
    const auto length = [&](std::int64_t chunk) { return std::min(step, count - chunk * step); };
    const auto fill = [&](std::int64_t chunk) {
      if (is_root) return;
      executor_->fill(channel.filler, stage(channel, rank_), part(chunk),
                      bytes_of(length(chunk), dtype), nullptr);
    };
    const auto use = [&](std::int64_t chunk) {
      if (!is_root) return;
      const auto* from = sources(channel, [&](int r) -> const void* {
        return r == root ? part(chunk) : stage(channel, r);
      });
      executor_->reduce(at(recv, chunk * step, dtype), {dtype}, from, size_, dtype, op,
                        length(chunk), nullptr);
    };

    begin_staged(channel, call, count, is_root || fills_first(call.send, bytes), bytes, stream,
                 fill);
    if (!all_filled_first(channel) && all_reachable(channel, &Call::send)) {
      channel.board.start_reading();
      if (is_root) {
        const auto* from = sources(channel, [&](int r) -> const void* {
          return r == root ? send : peer(channel, &Call::send, r);
        });
        executor_->reduce(recv, {dtype}, from, size_, dtype, op, count, stream);
      }
      meet(channel, stream);
      return took(channel, Op::reduce, Path::direct);
    }
    run_staged(channel, divide_up(count, step), fill, use);
    took_staged(channel, Op::reduce, bytes, Path::staged_not_direct);
  });
}

}  // namespace shardcomm
