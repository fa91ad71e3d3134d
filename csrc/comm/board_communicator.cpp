#include "comm/board_communicator.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "comm/window_memory.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

struct Way {
  const char* requested;
  const char* taken;
  const char* reason = "";
};

Way way_of(Path path) {
  constexpr const char* kNotWindow =
      "recv is not communication memory that all ranks share (allocate for use 'gather') at one "
      "place";
  constexpr const char* kPrivate =
      "a buffer is private memory of its rank: copied through a staging area";
  switch (path) {
    case Path::alone:
      return {"alone", "alone"};
    case Path::board:
      return {"board", "board"};
    case Path::window:
      return {"window", "window"};
    case Path::direct:
      return {"direct", "direct"};
    case Path::inlined:
      return {"inline", "inline"};
    case Path::direct_not_window:
      return {"window", "direct", kNotWindow};
    case Path::staged_not_window:
      return {"window", "staged", kNotWindow};
    case Path::staged_not_direct:
      return {"direct", "staged", kPrivate};
    case Path::hosts:
      return {"hosts", "hosts"};
  }
  return {"", ""};
}

}  // namespace

BoardCommunicator::BoardCommunicator(std::string transport, int rank, int size,
                                     const CommOptions& options, std::shared_ptr<Mapping> control,
                                     std::unique_ptr<WindowProvider> provider,
                                     std::unique_ptr<Executor> executor,
                                     std::function<bool(int)> has_ended)
    : transport_(std::move(transport)),
      rank_(rank),
      size_(size),
      exact_sums_(options.exact_sums),
      control_(std::move(control)),
      group_(ControlMemory::group(control_->data()), ControlMemory::boards(control_->data(), size),
             rank, size, options.deadline_s, std::move(has_ended),
             ControlMemory::names(control_->data(), size)),
      mailbox_(group_, ControlMemory::mail(control_->data(), size)),
      provider_(std::move(provider)),
      executor_(std::move(executor)),
      windows_(std::make_shared<Windows>(rank, provider_->shares_addresses())) {
  const bool reads_addresses = provider_->shares_addresses();
  gathers_ = std::make_unique<Channel>(group_, 0, reads_addresses,
                                       [this] { return is_stuck_before(*reduces_); });
  reduces_ = std::make_unique<Channel>(group_, 1, reads_addresses,
                                       [this] { return is_stuck_before(*gathers_); });
}

BoardCommunicator::~BoardCommunicator() { close(); }

void BoardCommunicator::attach(const std::function<void()>& prepare) {
  Call call;
  call.op = Op::attach;
  perform(*gathers_, "attach", [&] {
    begin(*gathers_, call, nullptr);
    prepare();
  });
  perform(*reduces_, "attach", [&] { begin(*reduces_, call, nullptr); });
  // The thread that attached need not be the one that uses the channels, so forget it.
  user_.store(0);
  gathers_->used.store(false);
  reduces_->used.store(false);
}

std::shared_ptr<Memory> BoardCommunicator::allocate(std::size_t bytes, Use use) {
  // Every rank's region starts on a page.
  const std::size_t most = std::numeric_limits<std::int64_t>::max() / size_ - kPageBytes;
  if (bytes > most) {
    throw std::invalid_argument("allocate: nbytes is " + std::to_string(bytes) + "; for " +
                                std::to_string(size_) + " ranks it must be at most " +
                                std::to_string(most));
  }
  Channel& channel = use == Use::gather ? *gathers_ : *reduces_;
  // Declared outside of `perform`: other ranks may still map this memory when an error unwinds.
  std::shared_ptr<void> made;
  std::shared_ptr<Memory> memory;
  perform(channel, "allocate", [&] {
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
        made = provider_->create(total, &call.handle);
      } catch (const CommError& error) {
        group_.abort(error.what());
        throw;
      }
    }
    channel.board.begin(call);
    const std::uint64_t handle = channel.board.call_of(0).handle;
    channel.board.start_reading();  // rank 0 keeps what it made until all have opened it or failed
    try {
      window.mapping = provider_->open(handle, total);
    } catch (const UnreachableError&) {
      find_out_who_died(channel.board.call_of(rank_));
      throw;
    }
    windows_->add(window);
    memory = std::make_shared<WindowMemory>(windows_, window, rank_);
    channel.board.meet();  // all have opened it
  });
  return memory;
}

void BoardCommunicator::run_barrier(std::int64_t tag, NativeStream stream) {
  perform(*gathers_, "barrier", [&] {
    Call call;
    call.op = Op::barrier;
    call.tag = tag;
    begin(*gathers_, call, stream);
    took(*gathers_, Op::barrier, Path::board);
  });
}

Sharers BoardCommunicator::sharers(const void* buffer, std::size_t bytes) const {
  if (!on_cpu() || bytes == 0) return {};
  if (!windows_->is_shared(windows_->find(buffer, bytes, "sharers: buffer"))) return {};
  return {rank_, size_};
}

void BoardCommunicator::run_sharing(const void* buffer, std::size_t bytes, std::int64_t tag) {
  perform(*gathers_, "barrier", [&] {
    Call call;
    call.op = Op::barrier;
    call.count = static_cast<std::int64_t>(bytes);
    call.tag = tag;
    call.recv = windows_->find(buffer, bytes, "barrier: buffer");
    begin(*gathers_, call, nullptr);
    gathers_->board.require_one_place();
    took(*gathers_, Op::barrier, Path::board);
  });
}

void BoardCommunicator::name_tag(std::int64_t tag, const std::string& name) {
  if (!group_.forked()) ControlMemory::names(control_->data(), size_)->set(tag, name);
}

void BoardCommunicator::abort(const std::string& reason) noexcept { group_.abort(reason); }

void BoardCommunicator::close() noexcept { group_.close(); }

Mailbox& BoardCommunicator::mailbox() {
  if (executor_->on_host()) return mailbox_;
  throw std::invalid_argument(
      "messages are of memory of the host, and this communicator is on a CUDA device, where its "
      "ranks are threads of one process: copy from the other rank's memory by cudaMemcpyAsync");
}

// Relaxed is enough: nothing else is read because of these words. A thread that is about to call
// for the first time cannot be known (docs/protocol.md).
void BoardCommunicator::used_by(Channel& channel, ThreadId thread) {
  channel.used.store(true, std::memory_order_relaxed);
  ThreadId first = user_.load(std::memory_order_relaxed);
  if (first == thread) return;
  if (first != 0 || !user_.compare_exchange_strong(first, thread)) several_users_.store(true);
}

bool BoardCommunicator::is_stuck_before(const Channel& other) const {
  return !several_users_.load() && other.used.load() && is_stuck(user_.load());
}

void BoardCommunicator::leave(Channel& channel, const char* operation) noexcept {
  channel.windows = nullptr;
  // This rank has posted the call, so the others wait in it. Out of memory and CUDA's errors end
  // the group even if it has not, since the others will come to this call.
  const bool known = channel.board.in_call();
  const auto leave_for = [&](const char* reason) {
    std::array<char, GroupMemory::kReasonBytes> text{};
    std::snprintf(text.data(), text.size(), "%s: %s", operation, reason);
    channel.board.leave(text.data());
  };
  try {
    throw;
  } catch (const std::bad_alloc&) {
    leave_for("this rank has no memory left");
  } catch (const CommError& error) {
    if (known) channel.board.leave(error.what());
  } catch (const CudaError& error) {
    leave_for(error.what());
  } catch (const Interruption&) {
    if (known) leave_for("interrupted");
  } catch (const std::exception& error) {
    if (known) leave_for(error.what());
  } catch (...) {
    if (known) leave_for("an exception that is none of C++'s own");
  }
  if (known) executor_->finish();
}

// A process that ends closes its files before others are told that it has ended. So a peer may see
// its memory gone before its death; this waits for the death, to name it.
void BoardCommunicator::find_out_who_died(const Call& call) {
  const Clock::time_point until = Clock::now() + std::chrono::seconds(1);
  while (Clock::now() < until) {
    const int dead = group_.find_dead();
    if (dead >= 0) group_.fail(Trouble::died, dead);
    group_.throw_if_failed(call);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void BoardCommunicator::check_outside(int channel) {
  for (int r = 0; r < size_; ++r) {
    if (!group_.has_ended(r)) continue;
    const std::optional<LastCall> last = group_.last_call(r, channel);
    if (last && last->pending) group_.fail(Trouble::died, r);
  }
  group_.throw_if_ended(call_of(channel, rank_));
}

std::vector<Receipt> BoardCommunicator::receipts() const {
  std::vector<Receipt> all;
  for (int op = 0; op < kOps; ++op) {
    const std::uint64_t taken =
        taken_[static_cast<std::size_t>(op)].load(std::memory_order_relaxed);
    if (taken == 0) continue;
    const Way way = way_of(static_cast<Path>(taken & 0xff));
    all.push_back({name(static_cast<Op>(op)), taken >> 8, way.requested, way.taken, way.reason});
  }
  return all;
}

void BoardCommunicator::begin(Channel& channel, const Call& call, NativeStream stream) {
  const std::uint64_t meeting = channel.meetings++;
  executor_->before_meeting(channel.index, meeting, stream);
  channel.board.begin(call);
  executor_->after_meeting(channel.index, meeting, stream);
}

// The counts go through the staging areas, as a chunk does: where all have come, all can read them.
void BoardCommunicator::begin_uneven(Channel& channel, const Call& call, const Parts& parts,
                                     NativeStream stream) {
  const auto counts = [&](int rank) {
    return reinterpret_cast<std::int64_t*>(stage(channel, rank));
  };
  for (int r = 0; r < size_; ++r) counts(rank_)[r] = parts.count(r);
  begin(channel, call, stream);
  const auto given = [&](int rank) {
    std::string text;
    for (int r = 0; r < size_; ++r) text += (r == 0 ? "" : ", ") + std::to_string(counts(rank)[r]);
    return group_.who(rank) + " gave [" + text + "]";
  };
  for (int r = 0; r < size_; ++r) {
    if (std::equal(counts(0), counts(0) + size_, counts(r))) continue;
    // All see the same, and all throw.
    const std::string text = "ranks gave different counts to " +
                             describe(channel.board.call_of(rank_)) + ": " + given(0) + "; " +
                             given(r);
    group_.throw_mismatch(text, channel.board.call_of(rank_));
  }
}

std::vector<const std::byte*> BoardCommunicator::readable_sends(int channel) {
  Channel& where = this->channel(channel);
  std::vector<const std::byte*> sends;
  if (!all_reachable(where, &Call::send)) return sends;
  where.board.start_reading();
  for (int r = 0; r < size_; ++r) sends.push_back(peer(where, &Call::send, r));
  return sends;
}

void BoardCommunicator::refuse(int channel, const std::string& text) {
  group_.throw_mismatch(text, this->channel(channel).board.call_of(rank_));
}

void BoardCommunicator::meet(Channel& channel, NativeStream stream) {
  const std::uint64_t meeting = channel.meetings++;
  executor_->before_meeting(channel.index, meeting, stream);
  channel.board.meet();
  executor_->after_meeting(channel.index, meeting, stream);
}

bool BoardCommunicator::all_reachable(const Channel& channel, Place Call::* place) const {
  for (int r = 0; r < size_; ++r) {
    if (!(channel.board.call_of(r).*place).reachable()) return false;
  }
  return true;
}

std::byte* BoardCommunicator::peer(Channel& channel, Place Call::* place, int rank) const {
  const Place& where = channel.board.call_of(rank).*place;
  std::byte* data = windows(channel).resolve(where, rank);
  if (data == nullptr && where.window != Place::kAddress) {
    throw CommError("rank " + std::to_string(group_.number(rank_)) +
                        " has let go of communication memory that rank " +
                        std::to_string(group_.number(rank)) + " still uses in " +
                        group_.describe(channel.board.call_of(rank)),
                    fault_in(channel.board.call_of(rank_), "mismatch"));
  }
  return data;
}

bool BoardCommunicator::all_filled_first(const Channel& channel) const {
  for (int r = 0; r < size_; ++r) {
    if (!channel.board.call_of(r).filled_first) return false;
  }
  return true;
}

void BoardCommunicator::took(const Channel& channel, Op op, Path path) {
  taken_[static_cast<std::size_t>(op)].store(
      channel.board.sequence() << 8 | static_cast<std::uint64_t>(path), std::memory_order_relaxed);
}

void BoardCommunicator::took_staged(const Channel& channel, Op op, std::size_t bytes, Path staged) {
  const bool is_inline = all_filled_first(channel) && bytes <= ControlMemory::kInlineBytes;
  took(channel, op, is_inline ? Path::inlined : staged);
}

}  // namespace shardcomm
