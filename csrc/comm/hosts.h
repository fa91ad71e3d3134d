// `hosts`: ranks of several hosts. include/shardcomm/hosts.h says how bytes go.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/board_communicator.h"
#include "comm/call.h"
#include "comm/filler.h"
#include "shardcomm/coding.h"
#include "shardcomm/hosts.h"
#include "shardcomm/stream.h"

namespace shardcomm {

class Chunks;

// What one rank tells the same rank of other hosts before anything else crosses: who it is, its
// call and, if all send so few, the bytes themselves. All are of one size, since nobody knows what
// comes.
struct Hello {
  static constexpr std::size_t kBytes = 1024;
  static constexpr std::size_t kRoom = kBytes - sizeof(Call) - 8;
  Call call;
  std::int32_t rank;
  std::int32_t size;
  std::byte payload[kRoom];
};
static_assert(sizeof(Hello) == Hello::kBytes);

class HostsCommunicator final : public Communicator {
 public:
  HostsCommunicator(std::shared_ptr<BoardCommunicator> on_host, std::unique_ptr<Across> across,
                    int host, int hosts);
  ~HostsCommunicator() override;

  // Meets all ranks of all hosts, before anything else.
  void attach();

  int rank() const override { return first() + index(); }
  int size() const override { return hosts_ * local_; }
  std::string transport() const override { return "hosts"; }
  bool codes_reduces() const override { return true; }
  std::shared_ptr<Memory> allocate(std::size_t bytes, Use use) override;
  Sharers sharers(const void* buffer, std::size_t bytes) const override {
    return on_host_->sharers(buffer, bytes);
  }
  Mailbox& mailbox() override;
  void name_tag(std::int64_t tag, const std::string& name) override;
  void abort(const std::string& reason) noexcept override;
  void close() noexcept override;
  void check() const override { on_host_->check(); }
  std::vector<Receipt> receipts() const override { return on_host_->receipts(); }
  // Those of this host; a rank does not see the other hosts'.
  std::vector<Pending> pending() const override { return on_host_->pending(); }

 private:
  // A call moves its elements in chunks. While one is used, the next ones cross, so that links
  // between hosts have no pause: kSlots - 1 chunks are under way at once.
  static constexpr int kSlots = 4;
  // Longer messages gain nothing on any link, and the first of a call is ready later.
  static constexpr std::size_t kMostBlockBytes = 512 * 1024;

  // Memory that grows, aligned as wire parts are.
  class Room {
   public:
    std::byte* of(std::size_t bytes) {
      lines_.resize(std::max(lines_.size(), (bytes + sizeof(Line) - 1) / sizeof(Line)));
      return data();
    }
    std::byte* data() { return reinterpret_cast<std::byte*>(lines_.data()); }

   private:
    struct alignas(kWireAlignBytes) Line {
      std::byte bytes[kWireAlignBytes];
    };
    std::vector<Line> lines_;
  };

  // A channel of calls. Its stage is memory that the ranks of a host share, in which chunk i has
  // slot i % kSlots:
  //
  //   gathers   a slot has a block for each rank of all hosts
  //   reduces   a slot has as many blocks for each rank of this host
  struct Lane {
    Lane(BoardCommunicator& on_host, int hosts, int of_channel, int blocks);
    // How many bytes a block has if a slot has so many blocks.
    static std::size_t block_room(int blocks);
    std::byte* slot(std::int64_t chunk) const;

    const int channel;
    std::size_t block_bytes;
    std::size_t slot_bytes;
    std::shared_ptr<Memory> stage;
    Hello hello{};                    // this rank's, in the present call
    std::vector<Hello> hellos;        // those of all hosts
    std::shared_ptr<Event> greeting;  // under way, or what it has told is not looked at yet
    bool agreed = false;              // what the worker makes of it: the chunks may cross
    // What goes across in each slot, and what has come. Nobody else reads or writes them, so that a
    // call that fails may leave them.
    std::array<Room, kSlots> out, in;
    Room sums;  // of partial sums that cross coded
    std::array<std::shared_ptr<Event>, kSlots> crossings;
    std::vector<const void*> sources;  // of a reduction
    Filler filler;                     // of the stage
    std::unique_ptr<Stream> worker = make_thread_stream();
  };
  using Crossing = std::function<void(Across&, int channel)>;

  void run_all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                      const Parts& parts, std::int64_t tag, NativeStream stream) override;
  void run_reduce_scatter(const void* send, DType dtype, void* recv, const Epilogue& epilogue,
                          const Parts& parts, RedOp op, std::int64_t tag,
                          NativeStream stream) override;
  void run_coded_reduce_scatter(const void* send, DType dtype, void* recv, const Epilogue& epilogue,
                                const Parts& parts, RedOp op, std::int64_t tag,
                                const Coding& coding) override;
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

  int first() const { return host_ * local_; }
  int index() const { return on_host_->rank(); }
  int rank_at(int host, int index) const { return host * local_ + index; }

  void leave_others() noexcept;
  // Runs `body`. If that has ended this host's communicator, the other hosts hear of it.
  void telling_others(const std::function<void()>& body);
  // Runs a call: all ranks of this host come with it, `body` runs, and then it has ended. A failure
  // ends it for all ranks.
  void perform(Lane& lane, Call call, const Parts& parts, const std::function<void()>& body);
  // Compares the present call with the other hosts', and gives them `bytes` bytes, at most
  // Hello::kRoom.
  void greet(Lane& lane, const void* payload = nullptr, std::size_t bytes = 0);
  // The same in two steps. Chunks may be started between them: the worker lets them cross if the
  // calls agree, and this thread need not wake up for that. Waiting for a chunk ends it, too.
  void start_greeting(Lane& lane, const void* payload = nullptr, std::size_t bytes = 0);
  void finish_greeting(Lane& lane);
  bool is_the_rank_of(const Hello& other, int host) const;
  void check_same(const Lane& lane, const Call& other, int rank) const;
  // `start` runs a chunk's crossing on the worker of the lane, and `finish` waits for its end.
  void start(Lane& lane, std::int64_t chunk, Crossing crossing);
  void finish(Lane& lane, std::int64_t chunk);
  // Both, for a crossing of no chunk. It runs on the worker, too, so that a signal can end this
  // thread's wait for it.
  void start_and_finish(Lane& lane, Crossing crossing);
  std::shared_ptr<Event> enqueue(Lane& lane, Crossing crossing);
  void wait_for(const Lane& lane, const Event& event);
  [[noreturn]] void throw_late(const Lane& lane) const;
  // The ranks of other hosts with which this one exchanges.
  std::string peers() const;
  void cross(const Lane& lane, const Crossing& crossing);

  // Fills in the other ranks' parts of recv; this rank's part is there. `in_window`: all ranks of
  // the host have one recv. `greeted`: parts were so short that they crossed already.
  void gather_parts(Lane& lane, std::byte* recv, DType dtype, const Parts& parts, bool in_window,
                    bool greeted);
  // `coding` may be null, here and below: partial sums cross as they are.
  void reduce_and_scatter(const void* send, DType dtype, void* recv, const Epilogue& epilogue,
                          const Parts& parts, RedOp op, std::int64_t tag, const Coding* coding);
  void reduce_parts(Lane& lane, const void* send, DType dtype, void* recv, const Epilogue& epilogue,
                    const Parts& parts, RedOp op, const Coding* coding);
  // Combines the elements of a chunk of the ranks of this host, for each host: `chunks.longest`
  // sums one after another. The first reads them where the ranks have them, the second takes them
  // through the stage, which is for all ranks together.
  void combine_where_they_are(Lane& lane, const std::vector<const std::byte*>& sends, DType dtype,
                              RedOp op, const Chunks& chunks, std::int64_t chunk, std::byte* sums);
  void combine_in_stage(Lane& lane, const void* send, DType dtype, RedOp op, const Chunks& chunks,
                        std::int64_t chunk, std::byte* sums);
  // Codes those sums, in `bytes` bytes for each host.
  void code_sums(const Lane& lane, const Coding& coding, const Chunks& chunks, std::int64_t chunk,
                 const std::byte* sums, std::byte* out, std::size_t bytes) const;
  void reduce_small(Lane& lane, void* buffer, DType dtype, std::int64_t count, RedOp op);
  // Combines the elements of the ranks of this host; those of rank i are at `of(i)`.
  template <class Of>
  void combine_host(Lane& lane, Of&& of, DType dtype, RedOp op, void* to, std::int64_t count);
  // Combines the hosts' partial results, which lie `stride` bytes apart.
  void combine_hosts(Lane& lane, const std::byte* from, std::size_t stride, DType partial, RedOp op,
                     void* to, const Epilogue& epilogue, std::int64_t count);
  [[noreturn]] void refuse(const char* operation) const;

  const std::shared_ptr<BoardCommunicator> on_host_;
  const std::unique_ptr<Across> across_;
  const int host_;
  const int hosts_;
  const int local_;  // the ranks of a host
  Lane gathers_;
  Lane reduces_;
};

}  // namespace shardcomm
