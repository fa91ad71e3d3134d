// What the parts of the played NCCL know of each other: communicators, the ranks that they join,
// and groups of calls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda/runtime.h"
#include "fake_nccl.h"
#include "fake_nccl/profile.h"

namespace fake_nccl {

enum Result : int {
  success = 0,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  in_progress = 7
};

// The newest ncclConfig_t, of which each version knows the first kConfigBytes.
struct Config {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char* net_name;
  int split_share;
  int traffic_class;
  const char* comm_name;
  int collnet_enable;
  int cta_policy;
  int rest[14];
};
static_assert(sizeof(Config) == 120);

// `reduce` is ncclAllReduce's, `reduce_to` is ncclReduce's.
enum class Kind { gather, scatter, reduce, reduce_to, broadcast, messages };
enum class Path { ring, symmetric, copy_engine };

struct Message {
  bool sent;
  char* data;
  std::size_t bytes;
  int peer;
  bool registered = false;  // sendIpcReg, recvIpcReg, sendNetReg, recvNetReg
};

// What one kernel does.
struct Work {
  Kind kind = Kind::messages;
  const char* send = nullptr;
  char* recv = nullptr;
  std::size_t count = 0;
  int dtype = 1;
  int op = 0;
  int root = 0;
  Path path = Path::ring;
  std::vector<Message> messages = {};
  bool registered = false;  // regUsed, of broadcasts
};

// A send whose receiver has not copied it yet.
struct Mail {
  const char* data;
  std::size_t bytes;
  bool registered = false;
  bool taken = false;
  bool told = false;  // that it is never taken
};

// The ranks of one unique id.
struct World {
  World(std::string its_id, int its_size) : id(std::move(its_id)), size(its_size) {}
  struct Meeting {
    std::map<int, Work> work;
    int leaving = 0;
    int left = 0;
  };
  const std::string id;
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::set<int>> came;  // to what hosts meet at
  std::map<std::uint64_t, Meeting> meetings;  // of collective kernels
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Mail>>> mail;
  std::map<int, std::map<int, std::pair<int, int>>> splits;  // number, rank: color, key
};

struct GroupJob;

struct Registration {
  char* data;
  std::size_t bytes;
  int uses = 1;
};
struct Window {
  char* data = nullptr;
  std::size_t bytes = 0;
  bool symmetric = false;
  void* local = nullptr;            // its local registration
  std::unique_ptr<char> structure;  // of the host (2.27), or else
  void* on_device = nullptr;
};

// Kept for ever, so that a use after its end can be told; `ended` says that NCCL has freed it.
struct Comm {
  std::shared_ptr<World> world;
  int rank = 0;
  int device = 0;
  bool blocking = true;
  int cta_policy = 0;
  int nodes = 1;
  bool symmetric = false;
  bool local_register = true;
  bool cumem = true;

  std::atomic<int> state{success};  // asyncResult
  std::atomic<int> proxy_error{success};
  std::atomic<bool> abort_flag{false};
  std::atomic<bool> destroy_flag{false};
  std::atomic<bool> ended{false};
  std::atomic<bool> gathered{false};  // intraComm0: init's first all-gather is done
  std::atomic<bool> ready{false};     // initState
  std::atomic<bool> finalized{false};
  std::shared_ptr<GroupJob> group_job;  // of the last non-blocking group
  std::atomic<Comm*> child{nullptr};    // of a split under way: aborted with its parent

  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  std::map<std::thread::id, int> callers;  // threads inside calls
  int running = 0;                         // kernels that were launched
  int graph_refs = 0;                      // kernels that live graphs hold (localPersistentRefs)
  std::map<void*, std::unique_ptr<Registration>> registrations;
  std::map<void*, Window> windows;

  std::set<std::string> connected;  // its callers'
  int splits = 0;
  int windows_made = 0;
  std::shared_ptr<fake::Fired> last_kernel;
  std::uint64_t executed = 0;  // the world's mutex

  int size() const { return world->size; }
};

struct Controls {
  std::mutex mutex;
  FakeNccl faults;
  FakeNcclCounts counts;
  std::map<std::pair<int, int>, unsigned long long> bytes;
  std::vector<std::unique_ptr<Comm>> comms;
  std::atomic<int> hosts_waiting{0};
  std::atomic<int> kernels_waiting{0};
};
Controls& controls();
// Counts one that waits, while it does.
class Waiting {
 public:
  explicit Waiting(std::atomic<int>& counter) : counter_(counter) { ++counter_; }
  ~Waiting() { --counter_; }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  std::atomic<int>& counter_;
};
FakeNccl faults();
void count(int FakeNcclCounts::* counter, int by = 1);
void sent(int from, int to, unsigned long long bytes);
bool instant();
bool hits(int faulty, int rank);
// What the test has this call return instead.
Result fault_of(FakeCall call, int rank);

// A communicator that a caller names. False, and counted, if it is none, or was ended.
bool known(const Comm* comm);
// ncclCommEnsureReady (init.cc).
Result ensure_ready(Comm* comm);
Result async_error(Comm* comm, int* state);

class InCall {
 public:
  explicit InCall(Comm* comm);
  ~InCall();
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  Comm* comm_;
};

// Hosts meet: comes to all of these, and waits until `needed` ranks came to each, or this
// communicator is aborted (bootstrap.cc checkAbort, socket.cc: ncclInternalError).
Result meet(Comm* comm, const std::vector<std::string>& places, int needed);
// The same where NCCL connects: once, and with the test's faults.
Result connect(Comm* comm, std::vector<std::string> places, int needed);
Result wait_for_abort(Comm* comm);
void set_abort(Comm* comm);

// --- group.cc ---

struct Job {
  Comm* comm;
  std::function<Result()> run;
  bool destroys;
};
struct Task {
  Comm* comm;
  Work work;
  cudaStream_t stream;
};
struct WindowTask {
  Comm* comm;
  std::function<Result()> run;
};

// What a thread has collected since ncclGroupStart.
struct GroupJob {
  std::vector<Job> jobs;
  std::vector<WindowTask> windows;
  std::vector<Task> tasks;
  std::mutex mutex;  // of the thread
  std::thread thread;
};
struct Group {
  int depth = 0;
  Result error = success;
  int blocking = -1;
  std::shared_ptr<GroupJob> job = std::make_shared<GroupJob>();
};
Group& group();

void group_start();
Result group_end();
Result group_error(Result result);  // ncclGroupErrCheck: kept for the group's end
Result async_launch(Job job);
void join_group(const Comm* comm);  // ncclGroupCommJoin
void finish_group_job(Comm* comm);  // ncclGroupJobComplete, ncclGroupJobAbort

// --- collectives, in enqueue.cc ---

Result enqueue(FakeCall call, Comm* comm, Work work, cudaStream_t stream);
Result connect_for(Comm* comm, const Work& work);
void launch(Comm* comm, Work work, cudaStream_t stream);
Path path_of(Comm* comm, const Work& work);

// --- registration ---

// Whether the range lies in a symmetric window.
bool in_window(Comm* comm, const void* data, std::size_t bytes);
// Whether the range is registered for a kernel that goes by the protocol Simple.
bool is_registered(Comm* comm, const void* data, std::size_t bytes, bool captured);
bool has_registrations(Comm* comm);
void forget_registrations(Comm* comm);

}  // namespace fake_nccl
