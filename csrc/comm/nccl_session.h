// One rank's two NCCL communicators, and the thread that watches over them.
//
//   caller     takes a channel (NcclUse), calls NCCL, and leaves the channel
//   watchdog   looks every kWaitSlice for
//                a caller that has been in NCCL for longer than the deadline,
//                a collective whose turn on its stream came longer ago than the deadline,
//                an error that NCCL's own threads met.
//              After any of these, or when the session was closed, it ends both communicators.
//              If a collective stays on the GPU for another deadline, it ends the process.
//
// NCCL's calls block: the first call of a kind connects, and waits on the host until the peers have
// come to theirs. When the watchdog aborts, a caller that waits there returns.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/call.h"
#include "comm/nccl_library.h"
#include "comm/nodes.h"
#include "comm/turn.h"
#include "cuda/runtime.h"
#include "shardcomm/communicator.h"
#include "shardcomm/nccl.h"

namespace shardcomm {

// A call whose work lies between two events. Its turn on the stream comes when `start` has fired
// and the channel's earlier collectives are done; then its deadline begins. `end` fires when the
// work is done.
struct WatchedCall {
  Call call;
  std::shared_ptr<Event> start;
  std::shared_ptr<Event> end;
  bool started = false;
  std::chrono::steady_clock::time_point since;
};

// The watched collectives of a channel, oldest first. A caller that issues more than kMost waits,
// well before the driver's own queue is full and NCCL would block in it.
struct WatchRing {
  static constexpr std::uint64_t kMost = 256;
  std::array<WatchedCall, kMost> slots;
  std::uint64_t issued = 0;
  std::uint64_t retired = 0;

  bool empty() const { return issued == retired; }
  bool full() const { return issued - retired == kMost; }
  WatchedCall& at(std::uint64_t number) { return slots[number % kMost]; }
};

// Communication memory that is registered with NCCL. It is freed with its last owner, which is
// after its registration has ended.
struct Registered {
  std::shared_ptr<void> memory;
  std::uint64_t number = 0;  // the number of the call that allocated it, the same on all ranks
  std::size_t bytes = 0;     // the size of the caller's part, which comes first
  // The part behind that, in which a reduce-scatter out of this memory may leave its result.
  std::byte* landing = nullptr;
  std::size_t landing_bytes = 0;
  void* local = nullptr;  // the handle of its local registration
  nccl::Window window = nullptr;
  bool may_be_window = false;  // whether every rank may reach its contents
  // Where messages are received whose senders send out of this memory; made when first needed.
  std::shared_ptr<void> inbox;
  void* inbox_local = nullptr;  // the handle of the inbox's registration

  bool known_to_nccl() const { return window != nullptr || local != nullptr; }
};

// A channel of collectives over NCCL. The first members are for the thread that uses the channel
// and, when no thread does any more, for the watchdog. The session's mutex guards the members from
// `in_use` on.
struct NcclChannel {
  nccl::Comm comm = nullptr;  // NCCL writes it while it connects
  std::map<const std::byte*, std::shared_ptr<Registered>> registered;  // by their first address
  std::unique_ptr<Stream> set_up;       // the stream of set-up, beside other queued work
  std::unique_ptr<DeviceMemory> words;  // a zero for barriers, then words that ranks exchange
  OwnedEvent captured_end;              // the end of the latest collective that was captured
  cudaEvent_t latest = nullptr;         // the end of the latest collective
  unsigned long long capture = 0;       // the capture that the latest was part of; 0: of none

  bool in_use = false;
  bool connected = false;
  Call call;  // the call of the thread that uses the channel
  std::chrono::steady_clock::time_point since;
  std::uint64_t sequence = 0;
  WatchRing ring;
  std::vector<std::shared_ptr<Registered>> unwanted;  // memory that no owner holds any more
};

// Lives as long as a graph with collectives. NCCL waits for such graphs when it ends.
class GraphCount {
 public:
  explicit GraphCount(std::shared_ptr<std::atomic<int>> count) : count_(std::move(count)) {
    ++*count_;
  }
  ~GraphCount() { --*count_; }
  GraphCount(const GraphCount&) = delete;
  GraphCount& operator=(const GraphCount&) = delete;

 private:
  std::shared_ptr<std::atomic<int>> count_;
};

class NcclSession : public std::enable_shared_from_this<NcclSession> {
 public:
  NcclSession(const nccl::Library& nccl, int rank, int size, int device,
              const NcclOptions& options);

  const nccl::Library& nccl;
  const int rank;
  const int size;
  const int device;
  const std::chrono::duration<double> deadline;
  NcclChannel gathers;
  NcclChannel reduces;
  Nodes nodes;  // filled by `connect`
  const std::unique_ptr<TagNames> names = std::make_unique<TagNames>();

  NcclChannel& channel(Use use) { return use == Use::gather ? gathers : reduces; }

  // Starts the watchdog and connects both channels, each from an id of its own. Collective; call it
  // once. Throws CommError.
  void connect(const std::array<nccl::UniqueId, 2>& ids, const NcclOptions& options);
  // Waits for collectives that are under way and leaves, or aborts them. Idempotent; the wait has
  // an end.
  void close() noexcept;

  // Notes a failure, in `call` if it was in any. The first failure stays: every later call throws
  // it, and the watchdog aborts. `kind` is that of CommFault.
  void fail(const char* kind, const std::string& text, const Call& call = {}) noexcept;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void check() const;  // throws CommError if the session has failed or was closed
  std::string refused(const Call& call, nccl::Result result) const;
  // The sentence of call.h, with the names of tags.
  std::string describe(const Call& call) const { return shardcomm::describe(call, names.get()); }
  // The collectives that this rank has called, or put on a stream, and that are not done. It does
  // not know of collectives that a graph launches.
  std::vector<Pending> pending();

  // Takes `memory`, to which no owner refers any more. Queued work may still use it, so it is freed
  // when the channel is used next, or with the communicator; in a capture nobody could wait for the
  // device.
  void let_go(NcclChannel& channel, std::shared_ptr<Registered> memory) noexcept;
  // Whether this process was forked from the one that made the session. A forked child has no
  // watchdog, and no part in its parent's session.
  bool forked() const;

 private:
  friend class NcclUse;
  using Clock = std::chrono::steady_clock;
  using Memories = std::vector<std::shared_ptr<Registered>>;

  void connect_channels(const std::array<nccl::UniqueId, 2>& ids, const NcclOptions& options);
  void find_nodes(std::uint64_t host);
  bool wait_for_device() const noexcept;  // whether all of the device's work is done
  void meet_all_peers();
  void forget(NcclChannel& channel, const Memories& memories);
  bool over();  // whether the watchdog has ended the channels, or could not
  bool ended() const { return failed() || closed_.load(); }
  std::string name() const;
  std::string late(const Call& call) const;

  // The watchdog's functions. Those that look need the mutex.
  void watch();
  void look(NcclChannel& channel);
  void look_at_nccl(NcclChannel& channel);
  bool idle() const;
  const WatchedCall* on_device(NcclChannel& channel);
  void end_channels();
  void abort_channels();
  void watch_abort(const std::atomic<bool>& freed);
  [[noreturn]] void end_process(const Call& call) const;
  bool destroy_channels();

  mutable std::mutex failure_mutex_;  // is taken after other mutexes
  std::string failure_;               // written once, before failed_, as is fault_
  CommFault fault_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point closed_at_;
  const std::shared_ptr<std::atomic<int>> graphs_ = std::make_shared<std::atomic<int>>(0);
  const int forks_;        // how many forks there had been when the session was made
  bool unloaded_ = false;  // the process is ending, and the driver has gone already
  bool over_ = false;
  bool stuck_ = false;  // a collective has stayed on the GPU after the abort
  std::thread watchdog_;
};

// One thread's use of a channel for one collective. It gives `call` its number. Throws
// std::invalid_argument if another thread uses the channel, and CommError if the session has failed
// or was closed.
class NcclUse {
 public:
  NcclUse(NcclSession& session, NcclChannel& channel, Call& call);
  ~NcclUse();
  NcclUse(const NcclUse&) = delete;
  NcclUse& operator=(const NcclUse&) = delete;

  // Makes a call to NCCL that must succeed. If it does not, the session fails, and this throws
  // CommError.
  template <class Function>
  void operator()(Function&& function) {
    const nccl::Result result = attempt(std::forward<Function>(function));
    if (result != nccl::kSuccess) {
      session_.fail("backend", session_.refused(channel_.call, result), channel_.call);
    }
    session_.check();
  }
  // Makes a call to NCCL that may fail without a failure of the session.
  template <class Function>
  nccl::Result attempt(Function&& function) {
    const nccl::Result result = function(channel_.comm);
    if (session_.failed()) session_.check();  // it returned because the watchdog has aborted
    return result;
  }

  // Sends messages between ranks, all at once. It calls issue(note, comm); `note` takes the result
  // of each call to NCCL.
  template <class Issue>
  void group(Issue&& issue) {
    (*this)([&](nccl::Comm comm) {
      nccl::Result first = nccl::kSuccess;
      session_.nccl.group_start();
      issue([&first](nccl::Result result) { first = first == nccl::kSuccess ? result : first; },
            comm);
      const nccl::Result ended = session_.nccl.group_end();
      return first == nccl::kSuccess ? ended : first;
    });
  }

  // Called around the work that is put on `stream`. That work comes after the channel's work on
  // other streams, and its deadline begins when its turn on `stream` has come. `begin` waits while
  // too much is under way. If the launch throws, `end` is not called, and the work is not watched.
  // Neither is work in a capture, which runs nothing now.
  void begin(cudaStream_t stream);
  void end(cudaStream_t stream);
  bool captured() const { return capture_ != 0; }  // after `begin`
  // Waits until no collective of the channel is under way. It has no deadline, since each
  // collective has its own.
  void drain();
  // Waits until all work on the channel's set-up stream is done, within this call's deadline.
  void finish_set_up();
  // Whether `mine` is true on every rank. Collective, for set-up only. All work on the set-up
  // streams of all ranks is then done.
  bool agree(bool mine);
  bool same_on_all(std::uint64_t mine);  // whether `mine` is the same on every rank; as `agree`

 private:
  template <class Done>
  void wait_without_deadline(const Done& done);

  std::array<std::int64_t, 2> least_of_all(std::array<std::int64_t, 2> values);
  void count_graph(cudaGraph_t graph);
  void forget_unwanted();

  const InCall in_call_;
  NcclSession& session_;
  NcclChannel& channel_;
  std::vector<std::shared_ptr<Registered>> gone_;  // freed when the channel is no longer in use
  WatchedCall* watched_ = nullptr;
  unsigned long long capture_ = 0;
};

inline constexpr std::size_t kZeroBytes = 128;  // the part of the words that barriers use

// Pauses between looks of a host that waits: none at first, then longer ones. It calls check_wait,
// and throws what that throws.
class Pauses {
 public:
  void pause();

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point checked_ = begin_;
};

}  // namespace shardcomm
