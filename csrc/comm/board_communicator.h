// The collectives of ranks that share memory and meet on a board. `shm`, and `local` on a CPU or on
// one GPU, differ in where memory comes from, in how a rank can die, and in what moves the bytes.
// Everything else is here, once.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/channel.h"
#include "comm/executor.h"
#include "comm/inspect.h"
#include "comm/windows.h"
#include "shardcomm/communicator.h"
#include "stream/waiting.h"

namespace shardcomm {

// The control memory of a group: the state of its ranks, for each channel a board and the staging
// areas through which private buffers go, and the names of tags.
struct ControlMemory {
  static constexpr int kChannels = Group::kChannels;  // gather, reduce
  // Each rank has two halves, so that one is filled while the other is read. Smaller halves would
  // stay in a second-level cache, but each half costs a meeting (measured: with 256 KiB it takes
  // 1.3 to 1.6 times as long).
  static constexpr std::size_t kStageBytes = 1024 * 1024;

  static std::size_t bytes(int size);
  static GroupMemory* group(std::byte* base);
  static Group::Boards boards(std::byte* base, int size);
  static std::byte* stage(std::byte* base, int size, int channel, int rank, int half);
  static TagNames* names(std::byte* base, int size);
};

class BoardCommunicator final : public Communicator {
 public:
  BoardCommunicator(std::string transport, int rank, int size, const CommOptions& options,
                    std::shared_ptr<Mapping> control, std::unique_ptr<WindowProvider> provider,
                    std::unique_ptr<Executor> executor, std::function<int()> find_dead);
  ~BoardCommunicator() override;

  // The first call of each channel. When all ranks have come, each calls `prepare`. If it throws
  // CommError, the group ends for all.
  void attach(const std::function<void()>& prepare);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string transport() const override { return transport_; }
  std::shared_ptr<Memory> allocate(std::size_t bytes, Use use) override;
  void name_tag(std::int64_t tag, const std::string& name) override;
  void abort(const std::string& reason) noexcept override;
  void close() noexcept override;
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
  void run_broadcast(void* buffer, std::size_t bytes, int root, NativeStream stream) override;
  void run_barrier(std::int64_t tag, NativeStream stream) override;
  // Runs one call of a channel. An error of this rank alone ends the call for the other ranks, too.
  template <class Body>
  void perform(Channel& channel, const char* operation, Body&& body) {
    const InCall in_call(this, operation);
    const Turn turn(channel.busy);
    used_by(channel, caller());
    try {
      body();
      channel.windows = nullptr;
      channel.board.end();
    } catch (...) {
      leave(channel, operation);
      throw;
    }
  }
  void used_by(Channel& channel, ThreadId thread);
  // Whether this rank can come to `other` only when this thread has ended its present call. That is
  // known only if a single thread, and the operations that it gives to streams, has used both
  // channels.
  bool is_stuck_before(const Channel& other) const;
  void leave(Channel& channel, const char* operation) noexcept;
  void refuse_parts_of_one_window(Channel& channel) const;
  // Throws if it is known, or becomes known within a second, that a rank has ended.
  void find_out_who_died(const Call& call);
  bool all_reachable(const Channel& channel, Place Call::* place) const;
  std::byte* peer(Channel& channel, Place Call::* place, int rank) const;
  std::byte* stage(const Channel& channel, int rank, std::int64_t chunk) const;
  // Meetings that order the work on `stream` against the other ranks' work.
  void begin(Channel& channel, const Call& call, NativeStream stream);
  // The same for a call whose elements are shared out as `parts`, in which all ranks must agree.
  void begin(Channel& channel, const Call& call, const Parts& parts, NativeStream stream);
  void meet(Channel& channel, NativeStream stream);
  // The staged ways go through host memory, a piece at a time. They are for ranks that do not reach
  // each other's addresses; on a device ranks do.
  void gather_staged(Channel& channel, const void* send, DType send_dtype, void* recv,
                     DType recv_dtype, const Parts& parts);
  void reduce_staged(Channel& channel, const void* send, DType dtype, void* recv,
                     const Epilogue& epilogue, const Parts& parts, RedOp op);
  void all_reduce_direct(Channel& channel, std::byte* buffer, DType dtype, std::int64_t count,
                         RedOp op, NativeStream stream);
  void all_reduce_staged(Channel& channel, std::byte* buffer, DType dtype, std::int64_t count,
                         RedOp op);
  void took(const Channel& channel, Op op, const char* requested, const char* taken,
            const char* reason = "");

  std::string transport_;
  int rank_;
  int size_;
  std::shared_ptr<Mapping> control_;
  Group group_;
  std::unique_ptr<WindowProvider> provider_;
  std::unique_ptr<Executor> executor_;
  std::atomic<ThreadId> user_{0};  // the thread that called first
  std::atomic<bool> several_users_{false};
  std::shared_ptr<Windows> windows_;  // shared with memory, which may outlive this object
  std::unique_ptr<Channel> gathers_;
  std::unique_ptr<Channel> reduces_;
  mutable std::mutex receipts_mutex_;
  std::map<Op, Receipt> receipts_;
};

}  // namespace shardcomm
