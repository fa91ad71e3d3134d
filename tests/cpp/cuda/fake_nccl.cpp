// An NCCL whose ranks are threads of this process. Every call is in progress until a thread has put
// its work on the stream; that work waits for the other ranks', as a kernel does, or for an abort.
// It counts what NCCL forbids: two calls at once, a call while another is in progress, a
// communicator destroyed with memory registered. (A use of one that is gone is the sanitizer's.)
#include "fake_nccl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"

namespace {

constexpr std::chrono::milliseconds kPoll{1};

enum Result : int { success = 0, internal = 3, invalid = 4, in_progress = 7 };
enum class Kind { gather, scatter, reduce, broadcast, exchange };

struct Message {
  bool sent;
  char* data;
  std::size_t bytes;
  int peer;
};

struct Work {
  Kind kind = Kind::exchange;
  const char* send = nullptr;
  char* recv = nullptr;
  std::size_t count = 0;
  int dtype = 1;
  int op = 0;
  int root = 0;
  std::vector<Message> messages;
};

struct Meeting {
  std::map<int, Work> work;
  int leaving = 0;
};

struct Group {
  explicit Group(int size) : size(size) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  std::map<std::uint64_t, Meeting> meetings;
  std::map<int, std::shared_ptr<Group>> children;
};

std::mutex groups_mutex;
std::map<std::string, std::shared_ptr<Group>> groups;
std::atomic<bool> no_window{false};
std::atomic<bool> never_launches{false};
std::atomic<bool> blocking_parent{false};
std::atomic<int> live{0};
std::atomic<int> misused{0};

struct Comm {
  Comm() { ++live; }
  ~Comm() { --live; }
  std::shared_ptr<Group> group;
  int rank = 0;
  std::atomic<int> state{in_progress};
  std::atomic<bool> aborted{false};
  std::atomic<bool> in_call{false};
  std::atomic<int> running{0};
  std::atomic<int> registered{0};
  std::uint64_t issued = 0;
  int splits = 0;
  std::thread job;
};

class InCall {
 public:
  explicit InCall(Comm* comm) : comm_(comm) {
    if (comm_->in_call.exchange(true)) ++misused;
  }
  ~InCall() { comm_->in_call = false; }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  Comm* comm_;
};

std::size_t item(int dtype) {
  if (dtype <= 1) return 1;
  if (dtype == 6 || dtype == 9) return 2;
  return dtype == 2 || dtype == 3 || dtype == 7 ? 4 : 8;
}

template <class T>
void fold(std::vector<char>& into, const char* from, std::size_t count, int op) {
  auto* to = reinterpret_cast<T*>(into.data());
  const auto* value = reinterpret_cast<const T*>(from);
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = op == 2   ? std::max(to[i], value[i])
            : op == 3 ? std::min(to[i], value[i])
                      : to[i] + value[i];
  }
}

// f32 and bytes are what the test reduces.
std::vector<char> reduced(std::map<int, Work>& work, std::size_t offset, const Work& mine) {
  std::vector<char> sum;
  for (const auto& [rank, theirs] : work) {
    const char* from = theirs.send + offset;
    if (sum.empty()) {
      sum.assign(from, from + mine.count * item(mine.dtype));
    } else if (mine.dtype == 7) {
      fold<float>(sum, from, mine.count, mine.op);
    } else {
      fold<unsigned char>(sum, from, mine.count, mine.op);
    }
  }
  return sum;
}

bool all_came(const Meeting& meeting, const Work& mine, int size) {
  if (static_cast<int>(meeting.work.size()) < size) return false;
  for (const auto& [rank, theirs] : meeting.work) {
    if (theirs.kind != mine.kind || theirs.count != mine.count) return false;
  }
  return true;
}

void kernel(Comm* comm, std::uint64_t number, const Work& mine) {
  Group& group = *comm->group;
  std::unique_lock<std::mutex> lock(group.mutex);
  Meeting& meeting = group.meetings[number];
  meeting.work[comm->rank] = mine;
  group.changed.notify_all();
  while (!all_came(meeting, mine, group.size)) {
    if (comm->aborted) return;
    group.changed.wait_for(lock, kPoll);
  }
  std::vector<std::pair<char*, std::vector<char>>> results;
  const std::size_t bytes = mine.count * item(mine.dtype);
  if (mine.kind == Kind::gather) {
    for (auto& [rank, theirs] : meeting.work) {
      results.push_back({mine.recv + rank * bytes, {theirs.send, theirs.send + bytes}});
    }
  } else if (mine.kind == Kind::scatter) {
    results.push_back({mine.recv, reduced(meeting.work, comm->rank * bytes, mine)});
  } else if (mine.kind == Kind::reduce) {
    results.push_back({mine.recv, reduced(meeting.work, 0, mine)});
  } else if (mine.kind == Kind::broadcast) {
    const char* from = meeting.work[mine.root].send;
    results.push_back({mine.recv, {from, from + bytes}});
  }
  for (const Message& to : mine.messages) {
    if (to.sent) continue;
    for (const Message& from : meeting.work[to.peer].messages) {
      if (!from.sent || from.peer != comm->rank) continue;
      results.push_back({to.data, {from.data, from.data + from.bytes}});
    }
  }
  // Nobody writes before all have read.
  ++meeting.leaving;
  group.changed.notify_all();
  while (meeting.leaving < group.size) {
    if (comm->aborted) return;
    group.changed.wait_for(lock, kPoll);
  }
  for (auto& [to, data] : results) std::memcpy(to, data.data(), data.size());
}

void join(Comm* comm) {
  if (comm->job.joinable()) comm->job.join();
}

// `job` of a call that is in progress until it has run.
template <class Job>
Result start(Comm* comm, Job job) {
  join(comm);
  comm->state = in_progress;
  comm->job = std::thread([comm, job] {
    job();
    comm->state = success;
  });
  return in_progress;
}

Result launch(Comm* comm, const Work& work, cudaStream_t stream) {
  if (comm->state != success) ++misused;
  return start(comm, [comm, work, stream, number = comm->issued++] {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    while (never_launches && !comm->aborted) std::this_thread::sleep_for(kPoll);
    if (comm->aborted) return;
    ++comm->running;
    fake_enqueue(stream, [=] {
      kernel(comm, number, work);
      --comm->running;
    });
  });
}

bool meet(Group& group, const std::atomic<bool>& aborted) {
  std::unique_lock<std::mutex> lock(group.mutex);
  ++group.joined;
  group.changed.notify_all();
  while (group.joined < group.size && !aborted) group.changed.wait_for(lock, kPoll);
  return !aborted;
}

void reclaim(Comm* comm) {
  join(comm);
  while (comm->running > 0) std::this_thread::sleep_for(kPoll);
  std::unique_ptr<Comm>(comm).reset();
}

thread_local int depth = 0;
thread_local std::vector<Comm*> to_abort;
thread_local std::vector<Message> messages;
thread_local Comm* messenger = nullptr;
thread_local cudaStream_t message_stream = nullptr;

Result post(Comm* comm, const Message& message, cudaStream_t stream) {
  messenger = comm;
  message_stream = stream;
  messages.push_back(message);
  return in_progress;
}

}  // namespace

extern "C" {

struct Id {
  char bytes[128];
};
struct Config {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

void fake_nccl_set(const FakeNccl* with) {
  no_window = with->no_window;
  never_launches = with->never_launches;
  blocking_parent = with->blocking_parent;
}
void fake_nccl_get(FakeNccl* counts) {
  counts->live = live;
  counts->misused = misused;
}

Result ncclGetVersion(int* version) {
  *version = 22703;
  return success;
}
Result ncclGetUniqueId(Id* id) {
  static std::atomic<int> made{0};
  std::memset(id->bytes, 0, sizeof(id->bytes));
  std::string("group " + std::to_string(made++)).copy(id->bytes, sizeof(id->bytes) - 1);
  return success;
}
Result ncclCommInitRankConfig(Comm** made, int size, Id id, int rank, Config* config) {
  if (config->size != 48 || config->magic != 0xcafebeef || config->blocking != 0) return invalid;
  auto comm = std::make_unique<Comm>();
  comm->rank = rank;
  {
    const std::lock_guard<std::mutex> lock(groups_mutex);
    auto& group = groups[id.bytes];
    if (!group) group = std::make_shared<Group>(size);
    comm->group = group;
  }
  *made = comm.release();
  return start(*made, [comm = *made] { meet(*comm->group, comm->aborted); });
}
Result ncclCommSplit(Comm* parent, int, int, Comm** made, Config*) {
  const InCall call(parent);
  *made = nullptr;
  const auto split = [parent, made, number = parent->splits++] {
    auto comm = std::make_unique<Comm>();
    comm->rank = parent->rank;
    {
      const std::lock_guard<std::mutex> lock(parent->group->mutex);
      auto& group = parent->group->children[number];
      if (!group) group = std::make_shared<Group>(parent->group->size);
      comm->group = group;
    }
    if (!meet(*comm->group, parent->aborted)) return;
    comm->state = success;
    *made = comm.release();
  };
  if (!blocking_parent) return start(parent, split);
  split();
  return success;
}
Result ncclCommFinalize(Comm* comm) {
  const InCall call(comm);
  return start(comm, [comm] {
    while (comm->running > 0 && !comm->aborted) std::this_thread::sleep_for(kPoll);
  });
}
Result ncclCommDestroy(Comm* comm) {
  if (comm->registered != 0) ++misused;
  reclaim(comm);
  return success;
}
Result ncclCommAbort(Comm* comm) {
  {
    const InCall call(comm);
  }
  comm->aborted = true;
  if (depth > 0) {
    to_abort.push_back(comm);
  } else {
    reclaim(comm);
  }
  return success;
}
Result ncclCommGetAsyncError(Comm* comm, int* state) {
  *state = comm->state;
  return success;
}
Result ncclCommCount(Comm* comm, int* size) {
  *size = comm->group->size;
  return success;
}
Result ncclCommUserRank(Comm* comm, int* rank) {
  *rank = comm->rank;
  return success;
}
Result ncclCommCuDevice(Comm* comm, int* device) {
  *device = comm->rank;
  return success;
}
const char* ncclGetErrorString(int result) {
  return result == invalid ? "invalid argument" : "an error";
}
const char* ncclGetLastError(Comm*) { return ""; }

Result ncclGroupStart() {
  ++depth;
  return success;
}
Result ncclGroupEnd() {
  if (--depth > 0) return success;
  for (Comm* comm : std::exchange(to_abort, {})) reclaim(comm);
  Comm* comm = std::exchange(messenger, nullptr);
  if (comm == nullptr) return success;
  Work work;
  work.messages = std::exchange(messages, {});
  return launch(comm, work, message_stream);
}
Result ncclAllGather(const char* send, char* recv, std::size_t count, int dtype, Comm* comm,
                     cudaStream_t stream) {
  const InCall call(comm);
  return launch(comm, {Kind::gather, send, recv, count, dtype, 0, 0, {}}, stream);
}
Result ncclReduceScatter(const char* send, char* recv, std::size_t count, int dtype, int op,
                         Comm* comm, cudaStream_t stream) {
  const InCall call(comm);
  return launch(comm, {Kind::scatter, send, recv, count, dtype, op, 0, {}}, stream);
}
Result ncclAllReduce(const char* send, char* recv, std::size_t count, int dtype, int op, Comm* comm,
                     cudaStream_t stream) {
  const InCall call(comm);
  return launch(comm, {Kind::reduce, send, recv, count, dtype, op, 0, {}}, stream);
}
Result ncclBroadcast(const char* send, char* recv, std::size_t count, int dtype, int root,
                     Comm* comm, cudaStream_t stream) {
  const InCall call(comm);
  return launch(comm, {Kind::broadcast, send, recv, count, dtype, 0, root, {}}, stream);
}
Result ncclSend(char* data, std::size_t count, int dtype, int peer, Comm* comm,
                cudaStream_t stream) {
  return post(comm, {true, data, count * item(dtype), peer}, stream);
}
Result ncclRecv(char* data, std::size_t count, int dtype, int peer, Comm* comm,
                cudaStream_t stream) {
  return post(comm, {false, data, count * item(dtype), peer}, stream);
}

Result ncclMemAlloc(void** data, std::size_t bytes) {
  if (bytes > std::size_t{1} << 40) return internal;
  cudaMalloc(data, bytes);
  return success;
}
Result ncclMemFree(void* data) {
  std::free(data);
  return success;
}
Result ncclCommRegister(Comm* comm, void* data, std::size_t, void** handle) {
  const InCall call(comm);
  ++comm->registered;
  *handle = data;
  return success;
}
Result ncclCommDeregister(Comm* comm, void*) {
  const InCall call(comm);
  --comm->registered;
  return success;
}
Result ncclCommWindowRegister(Comm* comm, void* data, std::size_t, void** window, int) {
  const InCall call(comm);
  if (no_window) return success;
  return start(comm, [comm, data, window] {
    std::this_thread::sleep_for(kPoll);
    ++comm->registered;
    *window = data;
  });
}
Result ncclCommWindowDeregister(Comm* comm, void* window) {
  return ncclCommDeregister(comm, window);
}

}  // extern "C"
