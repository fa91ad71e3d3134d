// The collectives of ranks that share memory and meet on a board. `shm`, and `local` on a CPU or on
// one GPU, differ in where memory comes from, in how a rank can die, and in what moves the bytes.
// Everything else is here, once.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/channel.h"
#include "comm/control_memory.h"
#include "comm/executor.h"
#include "comm/inspect.h"
#include "comm/mailbox.h"
#include "comm/windows.h"
#include "shardcomm/communicator.h"
#include "stream/waiting.h"

namespace shardcomm {

// Which way a collective went; a receipt tells.
enum class Path : std::uint8_t {
  alone = 1,
  board,
  window,
  direct,
  inlined,
  direct_not_window,
  staged_not_window,
  staged_not_direct,
  hosts
};

class BoardCommunicator final : public Communicator {
 public:
  BoardCommunicator(std::string transport, int rank, int size, const CommOptions& options,
                    std::shared_ptr<Mapping> control, std::unique_ptr<WindowProvider> provider,
                    std::unique_ptr<Executor> executor, std::function<bool(int)> has_ended);
  ~BoardCommunicator() override;

  // The first call of each channel. When all ranks have come, each calls `prepare`. If it throws
  // CommError, the group ends for all.
  void attach(const std::function<void()>& prepare);

  // A call that the caller makes of meetings: `body` runs when all ranks have come with equal
  // calls, and calls what follows here. Meetings need the host's executor.
  template <class Body>
  void perform_call(int channel, const Call& call, Body&& body) {
    Channel& where = this->channel(channel);
    perform(where, name(call.op), [&] {
      begin(where, call, nullptr);
      body();
      if (call.op != Op::allocate && call.op != Op::attach) took(where, call.op, Path::hosts);
    });
  }
  const Call& call_of(int channel, int rank) { return this->channel(channel).board.call_of(rank); }
  void meet(int channel) { this->channel(channel).board.meet(); }
  // While this rank waits outside of a meeting: throws CommError if the group has ended, or if a
  // rank has died in its call.
  void check_outside(int channel);
  void tell_wait_across(int channel, std::optional<Clock::time_point> since) {
    group_.tell_wait_across(channel, since);
  }
  double deadline_s() const { return group_.deadline_s(); }
  // Whether all ranks have posted one place in memory that they share as their `recv`. Throws
  // CommError if they have posted several.
  bool have_one_window(int channel);
  // The same of their `send`, the buffer of a broadcast. Throws CommError if this rank's lies in
  // memory that they share, and another rank's elsewhere.
  bool have_one_buffer(int channel);
  // As Board's.
  void require_one_place(int channel) { this->channel(channel).board.require_one_place(); }
  // Ends the group for a mismatch.
  [[noreturn]] void refuse(int channel, const std::string& text);
  Place place_of(const void* data, std::size_t bytes, const char* name) const {
    return windows_->find(data, bytes, name);
  }
  // The same of a buffer of this rank's own. Throws std::invalid_argument if it lies in memory that
  // all ranks share.
  Place own_place_of(const void* data, std::size_t bytes, const char* name) const {
    return windows_->find_own(data, bytes, name);
  }
  // What each rank has posted as its `send`, for this rank to read until the call ends; nothing if
  // some of it lies where this rank cannot read. Before they return from the call, all ranks must
  // meet.
  std::vector<const std::byte*> readable_sends(int channel);
  // Ends the group for what this rank says in `reason`.
  void end_for(Trouble trouble, std::string_view reason) noexcept {
    group_.end_for(trouble, reason);
  }
  std::string describe(const Call& call) const { return group_.describe(call); }
  bool on_cpu() const { return executor_->on_host(); }
  bool has_failed() const { return group_.has_failed(); }
  bool forked() const { return group_.forked(); }
  // From now on this group is one host's ranks among several hosts', and sentences give its ranks
  // the numbers that they have among all.
  void join_hosts(int host, int hosts) { group_.join_hosts(host, hosts); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string transport() const override { return transport_; }
  bool exact_sums() const override { return exact_sums_; }
  std::shared_ptr<Memory> allocate(std::size_t bytes, Use use) override;
  Sharers sharers(const void* buffer, std::size_t bytes) const override;
  void name_tag(std::int64_t tag, const std::string& name) override;
  void abort(const std::string& reason) noexcept override;
  void close() noexcept override;
  Mailbox& mailbox() override;
  void check() const override { group_.throw_if_ended({}); }
  std::vector<Receipt> receipts() const override;
  std::vector<Pending> pending() const override { return shardcomm::pending(group_); }

 private:
  void run_all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                      const Parts& parts, std::int64_t tag, NativeStream stream) override;
  void run_reduce_scatter(const void* send, DType dtype, void* recv, const Epilogue& epilogue,
                          const Parts& parts, RedOp op, std::int64_t tag,
                          NativeStream stream) override;
  void run_all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op, std::int64_t tag,
                      NativeStream stream) override;
  void run_broadcast(void* buffer, DType dtype, std::int64_t count, int root,
                     NativeStream stream) override;
  void run_barrier(std::int64_t tag, NativeStream stream) override;
  void run_sharing(const void* buffer, std::size_t bytes, std::int64_t tag) override;
  void run_all_to_all(const void* send, const Parts& send_parts, void* recv,
                      const Parts& recv_parts, DType dtype, std::int64_t tag,
                      NativeStream stream) override;
  void run_gather(const void* send, void* recv, DType dtype, std::int64_t count, int root,
                  std::int64_t tag, NativeStream stream) override;
  void run_scatter(const void* send, void* recv, DType dtype, std::int64_t count, int root,
                   std::int64_t tag, NativeStream stream) override;
  void run_reduce(const void* send, void* recv, DType dtype, std::int64_t count, RedOp op, int root,
                  std::int64_t tag, NativeStream stream) override;
  // Runs one call of a channel. An error of this rank alone ends the call for the other ranks, too.
  template <class Body>
  void perform(Channel& channel, const char* operation, Body&& body) {
    const InCall in_call(this, operation);
    const Turn turn(channel.busy, [this] { group_.throw_if_ended({}); });
    // Before the body: a rank alone posts nothing, and a forked child must not write to the areas
    // of its parent, the rank.
    channel.board.check();
    used_by(channel, caller());
    try {
      body();
      channel.windows = nullptr;
      channel.few = false;
      channel.board.end();
    } catch (...) {
      leave(channel, operation);
      throw;
    }
  }
  Channel& channel(int index) { return index == 0 ? *gathers_ : *reduces_; }
  void used_by(Channel& channel, ThreadId thread);
  // Whether this rank can come to `other` only when this thread has ended its present call. That is
  // known only if a single thread, and the operations that it gives to streams, has used both
  // channels.
  bool is_stuck_before(const Channel& other) const;
  void leave(Channel& channel, const char* operation) noexcept;
  void refuse_parts_of_one_window(Channel& channel) const;
  // Throws if it is known, or becomes known within a second, that a rank has ended.
  void find_out_who_died(const Call& call);
  // The windows, as they are when the present call first asks. Peers' are known by then: all were
  // allocated together.
  const WindowTable& windows(Channel& channel) const {
    if (channel.windows == nullptr) channel.windows = windows_->now();
    return *channel.windows;
  }
  bool all_reachable(const Channel& channel, Place Call::* place) const;
  std::byte* peer(Channel& channel, Place Call::* place, int rank) const;
  // Meetings that order the work on `stream` against the other ranks' work.
  void begin(Channel& channel, const Call& call, NativeStream stream);
  // The same for a call whose elements are shared out as uneven parts, in which all must agree.
  void begin_uneven(Channel& channel, const Call& call, const Parts& parts, NativeStream stream);
  void meet(Channel& channel, NativeStream stream);

  // The staged way goes through host memory, a chunk at a time: every rank fills its area, all
  // meet, and every rank uses the areas of all. It is for few bytes, and for ranks that do not
  // reach each other's addresses; on a device ranks do. `fill` and `use` take the number of a chunk
  // in its call.
  //
  // Whether this rank fills its first chunk before it posts the call, whose meeting is then the
  // chunk's, too. `own` is the place of its operand, `bytes` what goes through all areas.
  bool fills_first(const Place& own, std::size_t bytes) const {
    return executor_->on_host() && (!own.reachable() || bytes <= ControlMemory::kInlineBytes);
  }
  // `parts`, or just a number of elements: as in the collective.
  template <class Fill>
  void begin_staged(Channel& channel, Call& call, const Parts& parts, bool fills_first,
                    std::size_t bytes, NativeStream stream, Fill&& fill) {
    channel.staging.next();
    if (!parts.equal()) return begin_uneven(channel, call, parts, stream);
    call.filled_first = fills_first;
    channel.few = fills_first && bytes <= PostedCall::kElementBytes && executor_->on_host();
    if (channel.few) call.send = call.recv = {};  // one cache line tells all that is left
    if (fills_first) fill(0);
    begin(channel, call, stream);
  }
  bool all_filled_first(const Channel& channel) const;
  template <class Fill, class Use>
  void run_staged(Channel& channel, std::int64_t chunks, Fill&& fill, Use&& use) {
    const auto fill_area = [&](std::int64_t chunk) {
      channel.few = false;  // if this rank filled the first one, and another did not
      fill(chunk);
    };
    channel.staging.run(chunks, all_filled_first(channel), fill_area, use);
  }
  std::byte* stage(const Channel& channel, int rank) const {
    if (channel.few) return channel.board.elements(rank);
    return ControlMemory::stage(control_->data(), size_, channel.index, rank,
                                channel.staging.half());
  }
  // The operation that ranks post, and carry out, for what a caller names.
  RedOp posted(RedOp op) const { return exact_sums_ ? exact(op) : op; }
  // The sources of a reduction, one of each rank.
  template <class Of>
  const void* const* sources(Channel& channel, Of&& of) const {
    for (int r = 0; r < size_; ++r) channel.sources[static_cast<std::size_t>(r)] = of(r);
    return channel.sources.data();
  }

  [[noreturn]] void refuse_counts(const Channel& channel, int from, std::int64_t sent, int to,
                                  std::int64_t expected);
  // What is empty may have no address.
  void copy(void* dst, const void* src, std::size_t bytes, NativeStream stream) {
    if (bytes > 0 && dst != src) executor_->copy(dst, src, bytes, stream);
  }
  void broadcast_few(Channel& channel, Call& call, bool shared, void* buffer, std::size_t bytes);
  void require_buffer_of(Channel& channel, int rank, const Place& own);
  void all_reduce_direct(Channel& channel, std::byte* buffer, DType dtype, std::int64_t count,
                         RedOp op, NativeStream stream);
  void fill_others_shares(Channel& channel, const std::byte* chunk, DType dtype,
                          std::int64_t count);
  void all_reduce_shares(Channel& channel, std::byte* chunk, DType dtype, std::int64_t count,
                         RedOp op);
  void took(const Channel& channel, Op op, Path path);
  // A call of so many bytes through the staging areas; `staged` says what would be faster.
  void took_staged(const Channel& channel, Op op, std::size_t bytes, Path staged);

  std::string transport_;
  int rank_;
  int size_;
  bool exact_sums_;
  std::shared_ptr<Mapping> control_;
  Group group_;
  Mailbox mailbox_;
  std::unique_ptr<WindowProvider> provider_;
  std::unique_ptr<Executor> executor_;
  std::atomic<ThreadId> user_{0};  // the thread that called first
  std::atomic<bool> several_users_{false};
  std::shared_ptr<Windows> windows_;  // shared with memory, which may outlive this object
  std::unique_ptr<Channel> gathers_;
  std::unique_ptr<Channel> reduces_;
  // The path of each operation's latest call, and the call's number: 8 and 56 bits. 0: none yet.
  // Relaxed: the word says it all.
  std::array<std::atomic<std::uint64_t>, kOps> taken_{};
};

}  // namespace shardcomm
