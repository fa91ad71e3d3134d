#include "comm/host_communicator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "comm/convert.h"

namespace shardcomm {
namespace {

std::size_t board_bytes(int size) { return round_up(BoardMemory::bytes(size), kPageBytes); }

std::byte* at(void* data, std::int64_t index, DType dtype) {
  return static_cast<std::byte*>(data) + index * static_cast<std::int64_t>(itemsize(dtype));
}
const std::byte* at(const void* data, std::int64_t index, DType dtype) {
  return static_cast<const std::byte*>(data) + index * static_cast<std::int64_t>(itemsize(dtype));
}

std::size_t bytes_of(std::int64_t count, DType dtype) {
  return static_cast<std::size_t>(count) * itemsize(dtype);
}

void check(const char* operation, const char* name, const void* data, std::int64_t count) {
  if (count < 0) {
    throw std::invalid_argument(std::string(operation) + ": count is " + std::to_string(count) +
                                "; it must be at least 0");
  }
  if (count > 0 && data == nullptr) {
    throw std::invalid_argument(std::string(operation) + ": " + name + " is null");
  }
}

// A share of a window; gives it back when nobody refers to it any more, also after the communicator
// is gone.
class WindowMemory final : public Memory {
 public:
  WindowMemory(std::shared_ptr<Windows> windows, const Window& window, int rank)
      : windows_(std::move(windows)),
        id_(window.id),
        mapping_(window.mapping),
        data_(window.region(rank)),
        bytes_(window.region_bytes) {}
  ~WindowMemory() override { windows_->remove(id_); }
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;
  void* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }

 private:
  std::shared_ptr<Windows> windows_;
  std::uint32_t id_;
  std::shared_ptr<Mapping> mapping_;
  std::byte* data_;
  std::size_t bytes_;
};

constexpr const char* kNotWindow =
    "recv is not communication memory that all ranks share (allocate for use 'gather') at one "
    "place";
constexpr const char* kPrivate =
    "a buffer is private memory of its rank: copied through a staging area";

}  // namespace

std::size_t ControlMemory::bytes(int size) {
  return kChannels * (board_bytes(size) + static_cast<std::size_t>(size) * 2 * kStageBytes);
}

BoardMemory* ControlMemory::board(std::byte* base, int size, int channel) {
  return reinterpret_cast<BoardMemory*>(base +
                                        static_cast<std::size_t>(channel) * board_bytes(size));
}

std::byte* ControlMemory::stage(std::byte* base, int size, int channel, int rank, int half) {
  const std::size_t index = (static_cast<std::size_t>(channel) * static_cast<std::size_t>(size) +
                             static_cast<std::size_t>(rank)) *
                                2 +
                            static_cast<std::size_t>(half);
  return base + kChannels * board_bytes(size) + index * kStageBytes;
}

// Gathers and reduces proceed independently, each in its own order.
class HostCommunicator::Channel {
 public:
  Channel(int index, Board board) : index(index), board(std::move(board)) {}
  const int index;
  Board board;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::uint32_t windows_made = 0;
  std::int64_t chunks_staged = 0;
};

// One thread at a time: ranks must agree on the order of a channel's calls, and two threads cannot.
class HostCommunicator::Turn {
 public:
  explicit Turn(Channel& channel) : channel_(channel) {
    if (channel_.busy.test_and_set()) {
      throw std::invalid_argument(
          "this communicator's channel is in use by another thread; gathers and reduces are one "
          "channel each, and the calls of a channel need one order on all ranks");
    }
  }
  ~Turn() { channel_.busy.clear(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Channel& channel_;
};

HostCommunicator::HostCommunicator(std::string transport, int rank, int size,
                                   const CommOptions& options, std::shared_ptr<Mapping> control,
                                   std::unique_ptr<WindowProvider> provider,
                                   const FindDead& find_dead)
    : transport_(std::move(transport)),
      rank_(rank),
      size_(size),
      control_(std::move(control)),
      provider_(std::move(provider)),
      windows_(std::make_shared<Windows>(rank, provider_->shares_addresses())) {
  const std::chrono::duration<double> deadline(options.deadline_s);
  const auto channel = [&](int index) {
    return std::make_unique<Channel>(
        index, Board(ControlMemory::board(control_->data(), size, index), rank, size, deadline,
                     find_dead));
  };
  gathers_ = channel(0);
  reduces_ = channel(1);
}

HostCommunicator::~HostCommunicator() { close(); }

void HostCommunicator::attach() {
  Call call;
  call.op = Op::attach;
  gathers_->board.begin(call);
  reduces_->board.begin(call);
}

std::shared_ptr<Memory> HostCommunicator::allocate(std::size_t bytes, Use use) {
  Channel& channel = use == Use::gather ? *gathers_ : *reduces_;
  const Turn turn(channel);
  Window window;
  // Numbered apart per channel, after the numbers that Place reserves.
  window.id = 2 + channel.windows_made++ * 2 + (use == Use::gather ? 0 : 1);
  window.use = use;
  window.region_bytes = bytes;
  window.stride = use == Use::gather ? 0 : round_up(bytes, kPageBytes);
  const std::size_t total =
      use == Use::gather ? bytes : window.stride * static_cast<std::size_t>(size_);

  Call call;
  call.op = Op::allocate;
  call.root = static_cast<std::int32_t>(use);
  call.count = static_cast<std::int64_t>(bytes);
  if (rank_ == 0) {
    try {
      call.handle = provider_->create(total);
    } catch (const CommError& error) {
      channel.board.fail(error.what());
    }
  }
  channel.board.begin(call);
  const std::uint64_t handle = channel.board.call_of(0).handle;
  try {
    window.mapping = provider_->open(handle, total);
  } catch (const CommError& error) {
    channel.board.fail(error.what());
  }
  windows_->add(window);
  auto memory = std::make_shared<WindowMemory>(windows_, window, rank_);
  channel.board.meet();  // all have opened it
  if (rank_ == 0) provider_->forget(handle);
  return memory;
}

void HostCommunicator::all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                                  std::int64_t count, std::int64_t tag) {
  check("all_gather", "send", send, count);
  check("all_gather", "recv", recv, count);
  check_conversion("all_gather", send_dtype, recv_dtype);
  Channel& channel = *gathers_;
  const Turn turn(channel);
  std::byte* own = at(recv, rank_ * count, recv_dtype);
  if (size_ == 1) {
    convert(own, recv_dtype, send, send_dtype, count);
    return took(channel, Op::all_gather, "alone", "alone");
  }
  Call call;
  call.op = Op::all_gather;
  call.send_dtype = send_dtype;
  call.recv_dtype = recv_dtype;
  call.count = count;
  call.tag = tag;
  call.send = windows_->find(send, bytes_of(count, send_dtype), "all_gather: send");
  call.recv = windows_->find(recv, bytes_of(count * size_, recv_dtype), "all_gather: recv");
  // Nobody writes before this: a peer may still read what the window held.
  channel.board.begin(call);

  const Place& place = channel.board.call_of(0).recv;
  bool one_window = windows_->is_shared(place);
  for (int r = 0; r < size_; ++r) one_window &= channel.board.call_of(r).recv == place;
  if (one_window) {
    convert(own, recv_dtype, send, send_dtype, count);
    channel.board.meet();
    return took(channel, Op::all_gather, "window", "window");
  }
  if (all_reachable(channel, &Call::send)) {
    for (int i = 0; i < size_; ++i) {
      const int r = (rank_ + i) % size_;  // not all from the same rank at once
      convert(at(recv, r * count, recv_dtype), recv_dtype, peer(channel, &Call::send, r),
              send_dtype, count);
    }
    channel.board.meet();
    return took(channel, Op::all_gather, "window", "direct", kNotWindow);
  }
  gather_staged(channel, send, send_dtype, recv, recv_dtype, count);
  took(channel, Op::all_gather, "window", "staged", kNotWindow);
}

void HostCommunicator::gather_staged(Channel& channel, const void* send, DType send_dtype,
                                     void* recv, DType recv_dtype, std::int64_t count) {
  const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(recv_dtype));
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t n = std::min(step, count - done);
    const std::int64_t chunk = channel.chunks_staged++;
    convert(stage(channel, rank_, chunk), recv_dtype, at(send, done, send_dtype), send_dtype, n);
    // All have filled this half, so all have emptied the other, which the next chunk fills.
    channel.board.meet();
    for (int r = 0; r < size_; ++r) {
      std::memcpy(at(recv, r * count + done, recv_dtype), stage(channel, r, chunk),
                  bytes_of(n, recv_dtype));
    }
  }
}

void HostCommunicator::reduce_scatter(const void* send, DType dtype, void* recv,
                                      const Epilogue& epilogue, std::int64_t count, RedOp op,
                                      std::int64_t tag) {
  check("reduce_scatter", "send", send, count);
  check("reduce_scatter", "recv", recv, count);
  check_epilogue(epilogue, dtype);
  Channel& channel = *reduces_;
  const Turn turn(channel);
  if (size_ == 1) {
    reduce_cpu(recv, epilogue, &send, 1, dtype, op, count);
    return took(channel, Op::reduce_scatter, "alone", "alone");
  }
  Call call;
  call.op = Op::reduce_scatter;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.count = count;
  call.tag = tag;
  call.send = windows_->find(send, bytes_of(count * size_, dtype), "reduce_scatter: send");
  channel.board.begin(call);
  if (!all_reachable(channel, &Call::send)) {
    reduce_staged(channel, send, dtype, recv, epilogue, count, op);
    return took(channel, Op::reduce_scatter, "direct", "staged", kPrivate);
  }
  std::vector<const void*> sources;
  for (int r = 0; r < size_; ++r) {
    sources.push_back(at(peer(channel, &Call::send, r), rank_ * count, dtype));
  }
  reduce_cpu(recv, epilogue, sources.data(), size_, dtype, op, count);
  channel.board.meet();  // all have read: the senders may overwrite
  took(channel, Op::reduce_scatter, "direct", "direct");
}

void HostCommunicator::reduce_staged(Channel& channel, const void* send, DType dtype, void* recv,
                                     const Epilogue& epilogue, std::int64_t count, RedOp op) {
  const auto step = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype)) / size_);
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t n = std::min(step, count - done);
    const std::int64_t chunk = channel.chunks_staged++;
    for (int r = 0; r < size_; ++r) {
      std::memcpy(at(stage(channel, rank_, chunk), r * n, dtype), at(send, r * count + done, dtype),
                  bytes_of(n, dtype));
    }
    channel.board.meet();
    std::vector<const void*> sources;
    for (int r = 0; r < size_; ++r) {
      sources.push_back(at(stage(channel, r, chunk), rank_ * n, dtype));
    }
    reduce_cpu(at(recv, done, epilogue.dtype), epilogue, sources.data(), size_, dtype, op, n);
  }
}

void HostCommunicator::all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op) {
  check("all_reduce", "buffer", buffer, count);
  Channel& channel = *reduces_;
  const Turn turn(channel);
  if (size_ == 1) return took(channel, Op::all_reduce, "alone", "alone");
  Call call;
  call.op = Op::all_reduce;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.count = count;
  call.send = windows_->find(buffer, bytes_of(count, dtype), "all_reduce: buffer");
  channel.board.begin(call);
  if (all_reachable(channel, &Call::send)) {
    all_reduce_direct(channel, static_cast<std::byte*>(buffer), dtype, count, op);
    took(channel, Op::all_reduce, "direct", "direct");
  } else {
    all_reduce_staged(channel, static_cast<std::byte*>(buffer), dtype, count, op);
    took(channel, Op::all_reduce, "direct", "staged", kPrivate);
  }
}

// Rank r reduces slice r of all buffers into its own, which no other rank reads in that phase; then
// all copy.
void HostCommunicator::all_reduce_direct(Channel& channel, std::byte* buffer, DType dtype,
                                         std::int64_t count, RedOp op) {
  const std::int64_t slice = (count + size_ - 1) / size_;
  const auto begin = [&](int r) { return std::min(r * slice, count); };
  const auto length = [&](int r) { return begin(r + 1) - begin(r); };
  std::vector<const void*> sources;
  for (int r = 0; r < size_; ++r) {
    sources.push_back(at(peer(channel, &Call::send, r), begin(rank_), dtype));
  }
  reduce_cpu(at(buffer, begin(rank_), dtype), {dtype}, sources.data(), size_, dtype, op,
             length(rank_));
  channel.board.meet();
  for (int i = 1; i < size_; ++i) {
    const int r = (rank_ + i) % size_;
    std::memcpy(at(buffer, begin(r), dtype), at(peer(channel, &Call::send, r), begin(r), dtype),
                bytes_of(length(r), dtype));
  }
  channel.board.meet();
}

// Every rank reduces all of it: few bytes, and one meeting a chunk instead of two.
void HostCommunicator::all_reduce_staged(Channel& channel, std::byte* buffer, DType dtype,
                                         std::int64_t count, RedOp op) {
  const auto step = static_cast<std::int64_t>(ControlMemory::kStageBytes / itemsize(dtype));
  for (std::int64_t done = 0; done < count; done += step) {
    const std::int64_t n = std::min(step, count - done);
    const std::int64_t chunk = channel.chunks_staged++;
    std::memcpy(stage(channel, rank_, chunk), at(buffer, done, dtype), bytes_of(n, dtype));
    channel.board.meet();
    std::vector<const void*> sources;
    for (int r = 0; r < size_; ++r) sources.push_back(stage(channel, r, chunk));
    reduce_cpu(at(buffer, done, dtype), {dtype}, sources.data(), size_, dtype, op, n);
  }
}

void HostCommunicator::broadcast(void* buffer, std::size_t bytes, int root) {
  check("broadcast", "buffer", buffer, static_cast<std::int64_t>(bytes));
  if (root < 0 || root >= size_) {
    throw std::invalid_argument("broadcast: root is " + std::to_string(root) +
                                "; it must be a rank, 0 to " + std::to_string(size_ - 1));
  }
  Channel& channel = *gathers_;
  const Turn turn(channel);
  if (size_ == 1) return took(channel, Op::broadcast, "alone", "alone");
  Call call;
  call.op = Op::broadcast;
  call.root = root;
  call.count = static_cast<std::int64_t>(bytes);
  call.send = windows_->find(buffer, bytes, "broadcast: buffer");
  channel.board.begin(call);
  if (channel.board.call_of(root).send.reachable()) {
    const std::byte* source = peer(channel, &Call::send, root);
    if (source != buffer) std::memcpy(buffer, source, bytes);
    channel.board.meet();
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
}

void HostCommunicator::barrier() {
  const Turn turn(*gathers_);
  Call call;
  call.op = Op::barrier;
  gathers_->board.begin(call);
  took(*gathers_, Op::barrier, "board", "board");
}

void HostCommunicator::abort(const std::string& reason) noexcept {
  gathers_->board.abort(reason);
  reduces_->board.abort(reason);
}

void HostCommunicator::close() noexcept {
  gathers_->board.close();
  reduces_->board.close();
}

std::vector<Receipt> HostCommunicator::receipts() const {
  const std::lock_guard<std::mutex> lock(receipts_mutex_);
  std::vector<Receipt> all;
  for (const auto& entry : receipts_) all.push_back(entry.second);
  return all;
}

bool HostCommunicator::all_reachable(const Channel& channel, Place Call::* place) const {
  for (int r = 0; r < size_; ++r) {
    if (!(channel.board.call_of(r).*place).reachable()) return false;
  }
  return true;
}

std::byte* HostCommunicator::peer(Channel& channel, Place Call::* place, int rank) const {
  const Place& where = channel.board.call_of(rank).*place;
  std::byte* data = windows_->resolve(where, rank);
  if (data == nullptr && where.window != Place::kAddress) {
    channel.board.fail("rank " + std::to_string(rank_) +
                       " has let go of communication memory that rank " + std::to_string(rank) +
                       " still uses in " + describe(channel.board.call_of(rank)));
  }
  return data;
}

std::byte* HostCommunicator::stage(const Channel& channel, int rank, std::int64_t chunk) const {
  return ControlMemory::stage(control_->data(), size_, channel.index, rank,
                              static_cast<int>(chunk & 1));
}

void HostCommunicator::took(const Channel& channel, Op op, const char* requested, const char* taken,
                            const char* reason) {
  const std::lock_guard<std::mutex> lock(receipts_mutex_);
  receipts_[op] = {name(op), channel.board.sequence(), requested, taken, reason};
}

}  // namespace shardcomm
