// One rank's two NCCL communicators, and the thread that watches over them.
//
//   caller     takes a channel (NcclUse), calls NCCL, and leaves the channel
//   watchdog   looks every kWaitSlice for
//                a caller that has been in NCCL for longer than the deadline,
//                a collective whose turn on its stream came longer ago than that,
//                an error that NCCL's own threads met.
//              After any of these, or when the session was closed, it ends both communicators.
//
// NCCL's calls block: the first of a kind connects, and waits on the host until the peers have come
// to theirs. An abort from the watchdog brings back a caller that waits there.
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

// A collective between two events: its turn on the stream comes when `start` has fired and what the
// channel was given before is done, and from there its deadline runs; `end` fires when it is done.
struct Watched {
  Call call;
  std::shared_ptr<Event> start;
  std::shared_ptr<Event> end;
  bool started = false;
  std::chrono::steady_clock::time_point since;
};

// The watched collectives of a channel, oldest first. So many at most: who issues more waits, well
// before the driver's own queue is full and NCCL would block in it.
struct WatchRing {
  static constexpr std::uint64_t kMost = 256;
  std::array<Watched, kMost> slots;
  std::uint64_t issued = 0;
  std::uint64_t retired = 0;

  bool empty() const { return issued == retired; }
  bool full() const { return issued - retired == kMost; }
  Watched& at(std::uint64_t number) { return slots[number % kMost]; }
};

// Communication memory that NCCL was told of. It is freed with its last owner, so after NCCL has
// forgotten it.
struct Registered {
  std::shared_ptr<void> memory;
  std::uint64_t number = 0;      // of the call that allocated it, the same on all ranks
  std::size_t bytes = 0;         // of the caller's part, from the beginning on
  std::byte* landing = nullptr;  // behind it: where a reduce-scatter out of it may leave its result
  std::size_t landing_bytes = 0;
  void* local = nullptr;  // the handle of its local registration
  nccl::Window window = nullptr;
  bool may_be_window = false;  // what is in it, every rank may reach
};

// One order of collectives over NCCL. What stands first is for the thread that uses the channel,
// and, once nobody does, for the watchdog; the rest is guarded by the session's mutex.
struct NcclChannel {
  nccl::Comm comm = nullptr;  // NCCL writes it while it connects
  std::map<const std::byte*, std::shared_ptr<Registered>> registered;  // by where they begin
  std::unique_ptr<Stream> set_up;       // where set-up runs, beside what is queued elsewhere
  std::unique_ptr<DeviceMemory> words;  // a zero for barriers; then what ranks tell each other
  OwnedEvent captured_end;              // of the latest collective that was captured
  cudaEvent_t latest = nullptr;  // the end of the latest collective, whose stream was `stream`
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;  // the capture that it was part of; 0: of none

  bool in_use = false;
  bool connected = false;
  Call call;  // of the thread that uses it
  std::chrono::steady_clock::time_point since;
  std::uint64_t sequence = 0;
  WatchRing ring;
  std::vector<std::shared_ptr<Registered>> unwanted;  // nothing uses them any more
};

// Lives as long as a graph with collectives, which NCCL waits for when it ends.
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
  Nodes nodes;  // once connected
  const std::unique_ptr<TagNames> names = std::make_unique<TagNames>();

  NcclChannel& channel(Use use) { return use == Use::gather ? gathers : reduces; }

  // Collective; once. Starts the watchdog and connects both channels, each from an id of its own.
  // Throws CommError.
  void connect(const std::array<nccl::UniqueId, 2>& ids, const NcclOptions& options);
  // Lets what is under way end, and leaves; or aborts. Idempotent, and no wait without end.
  void close() noexcept;

  // The first failure, in `call` if in any, stays: every later call throws it, and the watchdog
  // aborts. `kind`: as CommFault's.
  void fail(const char* kind, const std::string& text, const Call& call = {}) noexcept;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void check() const;  // throws CommError when it has failed or was closed
  std::string refused(const Call& call, nccl::Result result) const;
  // As that of call.h, with the names of tags.
  std::string describe(const Call& call) const { return shardcomm::describe(call, names.get()); }
  // What this rank is in: called, or put on a stream, and not done. Those that a graph launches
  // nobody watches.
  std::vector<Pending> pending();

  // Nobody refers to `memory` any more, but what is queued may use it still: it is freed when the
  // channel is used next, or with the communicator. In a capture nobody could wait for the device.
  void let_go(NcclChannel& channel, std::shared_ptr<Registered> memory) noexcept;
  // A forked child has no watchdog, and no part in what its parent has.
  bool forked() const;

 private:
  friend class NcclUse;
  using Clock = std::chrono::steady_clock;
  using Memories = std::vector<std::shared_ptr<Registered>>;

  void connect_channels(const std::array<nccl::UniqueId, 2>& ids, const NcclOptions& options);
  void find_nodes(std::uint64_t host);
  void wait_for_device() const noexcept;
  void meet_all_peers();
  void forget(NcclChannel& channel, const Memories& memories);
  bool over();  // the watchdog has ended the channels, or could not
  bool ended() const { return failed() || closed_.load(); }
  std::string name() const;
  std::string late(const Call& call) const;

  // The watchdog's; what looks wants the mutex.
  void watch();
  void look(NcclChannel& channel);
  void look_at_nccl(NcclChannel& channel);
  bool idle() const;
  void end_channels();
  void abort_channels();
  bool destroy_channels();

  mutable std::mutex failure_mutex_;  // taken last
  std::string failure_;               // written once, before failed_, as is the next
  CommFault fault_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point closed_at_;
  const std::shared_ptr<std::atomic<int>> graphs_ = std::make_shared<std::atomic<int>>(0);
  const int forks_;        // before this process
  bool unloaded_ = false;  // the process ends, and the driver has gone before
  bool over_ = false;
  std::thread watchdog_;
};

// One thread's use of a channel for one collective; it gives `call` its number. Throws
// std::invalid_argument when another thread is in the channel, CommError when the session has
// failed or was closed.
class NcclUse {
 public:
  NcclUse(NcclSession& session, NcclChannel& channel, Call& call);
  ~NcclUse();
  NcclUse(const NcclUse&) = delete;
  NcclUse& operator=(const NcclUse&) = delete;

  // A call to NCCL that must succeed: if not, the session has failed, and this throws CommError.
  template <class Function>
  void operator()(Function&& function) {
    const nccl::Result result = attempt(std::forward<Function>(function));
    if (result != nccl::kSuccess) {
      session_.fail("backend", session_.refused(channel_.call, result), channel_.call);
    }
    session_.check();
  }
  // One that may fail alone.
  template <class Function>
  nccl::Result attempt(Function&& function) {
    const nccl::Result result = function(channel_.comm);
    if (session_.failed()) session_.check();  // it was brought back
    return result;
  }

  // Messages between ranks, all at once: issue(note, comm), where `note` takes each call's result.
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

  // Around what goes to `stream`, behind what the channel put on other streams, and whose deadline
  // runs once its turn there has come. `begin` waits while too much is under way. A launch that
  // throws is left unwatched: no `end`. So is a capture, which runs nothing now.
  void begin(cudaStream_t stream);
  void end(cudaStream_t stream);
  // Waits until nothing of the channel is under way, without a deadline: each has its own.
  void drain();
  // Until all that is on the channel's set-up stream is done; the deadline is this call's.
  void finish_set_up();
  // Collective; set-up only. Whether `mine` is true on every rank; all that was on the set-up
  // stream of every rank is then done.
  bool agree(bool mine);
  bool same_on_all(std::uint64_t mine);  // the same

 private:
  template <class Done>
  void wait_without_deadline(const Done& done);

  std::array<std::int64_t, 2> least_of_all(std::array<std::int64_t, 2> values);
  void count_graph(cudaGraph_t graph);
  void forget_unwanted();

  const InCall in_call_;
  NcclSession& session_;
  NcclChannel& channel_;
  std::vector<std::shared_ptr<Registered>> gone_;  // freed once the channel is no longer in use
  Watched* watched_ = nullptr;
  unsigned long long capture_ = 0;
};

inline constexpr std::size_t kZeroBytes = 128;  // what barriers have of the words

// Waits of the host: often at first, then with pauses; lets check_wait in, and throws what it does.
class Pauses {
 public:
  void pause();

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point checked_ = begin_;
};

}  // namespace shardcomm
