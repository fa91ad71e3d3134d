// The played NCCL does what its profile's sources do: each test is a way in which a transport has
// been wrong, or could be. Ranks are threads; NCCL is loaded, and called, as a transport does.
#include "fake_nccl.h"

#include <dlfcn.h>

#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"

namespace {

constexpr int kRanks = 3;
enum Result : int {
  success = 0,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7
};
enum DType : int { u8 = 1, i32 = 2, f16 = 6, f32 = 7, f64 = 8, bf16 = 9 };
enum Op : int { sum = 0, max = 2, avg = 4 };
using Comm = struct Opaque*;

struct Id {
  char bytes[128];
};
// 2.27's, which older ones cut and newer ones fill up.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 22700;
  int blocking = 1;
  int ctas[3] = {INT_MIN, INT_MIN, INT_MIN};
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int traffic_class = INT_MIN;
  const char* comm_name = nullptr;
  int collnet_enable = INT_MIN;
  int cta_policy = INT_MIN;
  int rest[2] = {INT_MIN, INT_MIN};
};
static_assert(sizeof(Config) == 72);

void require(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim.c_str());
  std::_Exit(1);
}

struct Nccl {
  explicit Nccl(const char* path) : library(dlopen(path, RTLD_NOW)) {
    require(library != nullptr, "the library is loaded");
    get_version(&version);
  }
  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(library, name));
  }
  bool has(const char* name) const { return dlsym(library, name) != nullptr; }
  void* library;
  int version = 0;

#define FIND(member, name, ...) Result (*member)(__VA_ARGS__) = find<Result(__VA_ARGS__)>(name)
  FIND(get_version, "ncclGetVersion", int*);
  FIND(get_unique_id, "ncclGetUniqueId", Id*);
  FIND(init, "ncclCommInitRankConfig", Comm*, int, Id, int, Config*);
  FIND(split, "ncclCommSplit", Comm, int, int, Comm*, Config*);
  FIND(finalize, "ncclCommFinalize", Comm);
  FIND(destroy, "ncclCommDestroy", Comm);
  FIND(abort, "ncclCommAbort", Comm);
  FIND(async_error, "ncclCommGetAsyncError", Comm, Result*);
  FIND(count, "ncclCommCount", Comm, int*);
  FIND(group_start, "ncclGroupStart");
  FIND(group_end, "ncclGroupEnd");
  FIND(all_gather, "ncclAllGather", const void*, void*, std::size_t, DType, Comm, cudaStream_t);
  FIND(reduce_scatter, "ncclReduceScatter", const void*, void*, std::size_t, DType, Op, Comm,
       cudaStream_t);
  FIND(all_reduce, "ncclAllReduce", const void*, void*, std::size_t, DType, Op, Comm, cudaStream_t);
  FIND(broadcast, "ncclBroadcast", const void*, void*, std::size_t, DType, int, Comm, cudaStream_t);
  FIND(send, "ncclSend", const void*, std::size_t, DType, int, Comm, cudaStream_t);
  FIND(recv, "ncclRecv", void*, std::size_t, DType, int, Comm, cudaStream_t);
  FIND(mem_alloc, "ncclMemAlloc", void**, std::size_t);
  FIND(mem_free, "ncclMemFree", void*);
  FIND(comm_register, "ncclCommRegister", Comm, void*, std::size_t, void**);
  FIND(comm_deregister, "ncclCommDeregister", Comm, void*);
  FIND(window_register, "ncclCommWindowRegister", Comm, void*, std::size_t, void**, int);
  FIND(window_deregister, "ncclCommWindowDeregister", Comm, void*);
#undef FIND
  void (*set)(const FakeNccl*) = find<void(const FakeNccl*)>("fake_nccl_set");
  void (*get)(FakeNcclCounts*) = find<void(FakeNcclCounts*)>("fake_nccl_get");
  void (*reset)() = find<void()>("fake_nccl_reset");
  void (*fail)(int, int) = find<void(int, int)>("fake_nccl_async_error");
  unsigned long long (*bytes)(int, int) = find<unsigned long long(int, int)>("fake_nccl_bytes");
  void (*instant)(int) = find<void(int)>("fake_nccl_instant");

  FakeNcclCounts counts() const {
    FakeNcclCounts all;
    get(&all);
    return all;
  }
  Id id() const {
    Id made;
    get_unique_id(&made);
    return made;
  }
  Comm make(const Id& id, int rank, int size = kRanks, Config config = {}) const {
    Comm comm = nullptr;
    const Result result = init(&comm, size, id, rank, &config);
    require(result == success, "init succeeds");
    return comm;
  }
  Result state(Comm comm) const {
    Result now = success;
    require(async_error(comm, &now) == success, "the state is told");
    return now;
  }
  Result settle(Comm comm) const {
    Result now = in_progress;
    while ((now = state(comm)) == in_progress) std::this_thread::yield();
    return now;
  }
};

class Queue {
 public:
  Queue() { cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~Queue() { cudaStreamDestroy(stream_); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  operator cudaStream_t() const { return stream_; }
  void finish() const { cudaStreamSynchronize(stream_); }

 private:
  cudaStream_t stream_ = nullptr;
};

void on_ranks(const std::function<void(int)>& body, int size = kRanks) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, rank] {
      cudaSetDevice(rank);
      body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A test starts without faults, and must leave nothing behind.
void run(const char* name, const Nccl& nccl, const std::function<void(const Nccl&)>& test,
         const FakeNccl& faults = {}) {
  std::printf("%s\n", name);
  nccl.set(&faults);
  nccl.reset();
  test(nccl);
  require(nccl.counts().live == 0, "no communicator is left");
}

void require_clean(const Nccl& nccl) {
  require(nccl.counts().misused() == 0, "nothing is misused");
}

float gathered(const Nccl& nccl, Comm comm, int rank, const Queue& queue) {
  std::vector<float> all(kRanks);
  const auto mine = static_cast<float>(rank + 1);
  require(nccl.all_gather(&mine, all.data(), 1, f32, comm, queue) == success, "a gather");
  queue.finish();
  return all[0] + 10 * all[1] + 100 * all[2];
}

void symbols_are_those_of_the_version(const Nccl& nccl) {
  require(nccl.has("ncclMemAlloc") == (nccl.version >= 21900), "ncclMemAlloc since 2.19");
  require(nccl.has("ncclCommRegister") == (nccl.version >= 21900), "ncclCommRegister since 2.19");
  require(nccl.has("ncclCommWindowRegister") == (nccl.version >= 22700), "windows since 2.27");
}

void collectives(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    Queue queue;
    require(gathered(nccl, comm, rank, queue) == 321, "gathered");
    std::vector<std::int32_t> parts{1, 2, 3};
    std::int32_t part = 0;
    nccl.reduce_scatter(parts.data(), &part, 1, i32, sum, comm, queue);
    std::vector<double> value{1.0 * rank, 2.0 * rank, -1.0 * rank, 5};
    nccl.all_reduce(value.data(), value.data(), 4, f64, max, comm, queue);
    float mean = static_cast<float>(rank);
    nccl.all_reduce(&mean, &mean, 1, f32, avg, comm, queue);
    std::int32_t whole = rank + 1;
    nccl.all_reduce(&whole, &whole, 1, i32, avg, comm, queue);
    char letter = static_cast<char>('a' + rank);
    nccl.broadcast(&letter, &letter, 1, u8, 1, comm, queue);
    char from = 0;
    nccl.group_start();
    nccl.send(&letter, 1, u8, (rank + 1) % kRanks, comm, queue);
    nccl.recv(&from, 1, u8, (rank + kRanks - 1) % kRanks, comm, queue);
    require(nccl.group_end() == success, "a group");
    queue.finish();
    require(part == kRanks * (rank + 1), "reduced");
    require(value == std::vector<double>{2, 4, 0, 5}, "the greatest");
    require(std::abs(mean - 1) < 1e-6, "the mean");
    require(whole == 2, "the mean of integers");
    require(letter == 'b' && from == 'b', "sent on");
    require(nccl.destroy(comm) == success, "destroyed");
  });
  require(nccl.counts().averages_premultiplied == kRanks, "the mean of floats is premultiplied");
  require_clean(nccl);
}

// A ring passes each share of n - 1 others to the next rank; a send goes to its receiver.
void bytes_are_counted_by_ranks(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    Queue queue;
    std::vector<float> all(kRanks * 8);
    std::vector<float> mine(8);
    nccl.all_gather(mine.data(), all.data(), 8, f32, comm, queue);
    nccl.reduce_scatter(all.data(), mine.data(), 8, f32, sum, comm, queue);
    queue.finish();
    nccl.group_start();
    if (rank == 0) nccl.send(mine.data(), 8, f32, 2, comm, queue);
    if (rank == 2) nccl.recv(mine.data(), 8, f32, 0, comm, queue);
    nccl.group_end();
    queue.finish();
    nccl.destroy(comm);
  });
  require(nccl.bytes(0, 1) == 2 * 2 * 32 && nccl.bytes(2, 0) == 2 * 2 * 32, "to the next");
  require(nccl.bytes(0, 2) == 32 && nccl.bytes(1, 0) == 0, "and to the receiver");
}

// Ring: bf16 rounds at each hop. 256 + 1 is 256 in bf16, however often.
void a_ring_rounds_at_each_hop(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    Queue queue;
    const std::uint16_t kOne = 0x3f80;
    const std::uint16_t k256 = 0x4380;
    std::vector<std::uint16_t> parts(kRanks, rank == 1 ? k256 : kOne);
    std::uint16_t mine = 0;
    nccl.reduce_scatter(parts.data(), &mine, 1, bf16, sum, comm, queue);
    queue.finish();
    // 256 first, or second: 256 + 1 + 1 = 256; last, as on rank 1's own part: 2 + 256 = 258.
    require(mine == (rank == 1 ? 0x4381 : k256), "rounded");
    nccl.destroy(comm);
  });
}

void configurations_are_checked(const Nccl& nccl) {
  const auto result = [&](const Config& config) {
    Comm comm = nullptr;
    Config given = config;
    const Result made = nccl.init(&comm, 1, nccl.id(), 0, &given);
    require((comm != nullptr) == (made == success), "no handle of a refused configuration");
    if (comm != nullptr) nccl.destroy(comm);
    return made;
  };
  Config config;
  require(result(config) == success, "2.27's is accepted by all");
  config.size = 48;
  config.version = 21801;
  require(result(config) == success, "2.18's is accepted by all");
  config.magic = 1;
  require(result(config) == invalid_argument, "not without the magic number");
  config = {};
  config.blocking = 2;
  require(result(config) == invalid_argument, "blocking is 0 or 1");
  config = {};
  config.cta_policy = 2;
  const bool refused = nccl.version >= 22700 && nccl.version < 22800;
  require(result(config) == (refused ? invalid_argument : success), "2.27 has no zero-CTA policy");
  require(nccl.counts().cta_policy == (nccl.version >= 22800 ? 2 : 0), "older ones do not see it");
}

void await(const std::atomic<int>& here, int number) {
  while (here.load() < number) std::this_thread::yield();
}

// The handle is there while a blocking init blocks, so that another thread can abort it; which is
// what frees it, as a failed init does not.
void a_blocking_init_is_aborted_by_another_thread(const Nccl& nccl) {
  const Id id = nccl.id();
  Comm comm = nullptr;
  std::thread blocked([&] {
    Config config;
    require(nccl.init(&comm, 2, id, 0, &config) == internal_error, "it ends with an error");
  });
  Comm seen = nullptr;
  while (seen == nullptr) __atomic_load(&comm, &seen, __ATOMIC_ACQUIRE);
  require(nccl.state(seen) == success, "a blocking communicator is never in progress");
  nccl.group_start();
  require(nccl.abort(seen) == success, "aborted");
  blocked.join();
  require(nccl.group_end() == success, "and freed");
  require_clean(nccl);
}

void two_inits_in_one_group(const Nccl& nccl) {
  const Id first = nccl.id();
  const Id second = nccl.id();
  on_ranks([&](int rank) {
    Comm a = nullptr;
    Comm b = nullptr;
    Config config;
    nccl.group_start();
    require(nccl.init(&a, kRanks, first, rank, &config) == success && a != nullptr, "at once");
    require(nccl.init(&b, kRanks, second, rank, &config) == success && b != nullptr, "at once");
    require(nccl.group_end() == success, "both");
    Queue queue;
    require(gathered(nccl, a, rank, queue) == gathered(nccl, b, rank, queue), "both work");
    nccl.destroy(a);
    nccl.destroy(b);
  });
  require_clean(nccl);
}

// Two ranks make the same call. If it blocks, rank 0 does not return before rank 1 comes to it.
class Steps {
 public:
  void together(int rank, bool blocks, const std::function<void()>& call) {
    const int step = ++steps_[rank];
    if (rank == 0) {
      begun_ = step;
      call();
      returned_ = step;
      return;
    }
    await(blocks ? begun_ : returned_, step);
    for (int i = 0; i < 1000 && blocks; ++i) {
      require(returned_ < step, "the host waits for its peer");
      std::this_thread::yield();
    }
    call();
    await(returned_, step);
  }

 private:
  int steps_[2] = {0, 0};
  std::atomic<int> begun_{0};
  std::atomic<int> returned_{0};
};

// The first collective of an algorithm waits on the host for all ranks (since 2.22), the first
// message for its peer (always); kernels wait on their streams.
void connections_are_made_by_the_first_call(const Nccl& nccl, bool eager) {
  const bool lazy = nccl.version >= 22200 && !eager;
  const Id id = nccl.id();
  Steps steps;
  on_ranks(
      [&](int rank) {
        Comm comm = nccl.make(id, rank, 2);
        Queue queue;
        float value = 1;
        std::vector<float> all(2);
        const auto gather = [&] { nccl.all_gather(&value, all.data(), 1, f32, comm, queue); };
        const auto reduce = [&] { nccl.all_reduce(&value, &value, 1, f32, sum, comm, queue); };
        const auto message = [&] {
          rank == 0 ? nccl.send(&value, 1, f32, 1, comm, queue)
                    : nccl.recv(&value, 1, f32, 0, comm, queue);
        };
        steps.together(rank, lazy, gather);
        steps.together(rank, false, gather);
        steps.together(rank, lazy, reduce);
        steps.together(rank, false, reduce);
        steps.together(rank, true, message);
        steps.together(rank, false, message);
        queue.finish();
        nccl.destroy(comm);
      },
      2);
  require_clean(nccl);
}

// A rank that waits in its first message, aborted by its watchdog in a group: the flags end the
// wait, and the memory stays until the group ends. Before 2.22 it goes at once, under the call.
void an_abort_in_a_group_frees_at_its_end(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks(
      [&](int rank) {
        Comm comm = nccl.make(id, rank, 2);
        if (rank == 1) {  // never sends
          nccl.abort(comm);
          return;
        }
        while (nccl.counts().live > 1) std::this_thread::yield();
        std::atomic<int> returned{0};
        std::thread watchdog([&] {
          while (nccl.counts().hosts_waiting == 0) std::this_thread::yield();
          nccl.group_start();
          nccl.abort(comm);
          await(returned, 1);
          require(nccl.counts().live == (nccl.version >= 22200 ? 1 : 0), "freed when?");
          require(nccl.group_end() == success, "freed");
        });
        Queue queue;
        float value = 0;
        require(nccl.recv(&value, 1, f32, 1, comm, queue) == internal_error, "the call ends");
        ++returned;
        watchdog.join();
        queue.finish();
      },
      2);
  require(nccl.counts().concurrent_calls == 0, "an abort is no concurrent call");
  require(nccl.counts().ended_under_call == (nccl.version >= 22200 ? 0 : 1), "under the call");
}

void an_abort_ends_kernels(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    Queue queue;
    gathered(nccl, comm, rank, queue);
    float value = 1;
    if (rank == 0) {
      require(nccl.all_gather(&value, &value, 0, f32, comm, queue) == success, "of nothing");
      std::vector<float> all(kRanks);
      require(nccl.all_gather(&value, all.data(), 1, f32, comm, queue) == success, "launched");
      require(nccl.abort(comm) == success, "aborted");
      queue.finish();
      require(all[0] == 0, "and nothing was written");
    } else {
      nccl.abort(comm);
    }
  });
  require_clean(nccl);
}

void use_after_the_end_is_counted(const Nccl& nccl) {
  Comm comm = nccl.make(nccl.id(), 0, 1);
  nccl.destroy(comm);
  require(nccl.all_gather(nullptr, nullptr, 0, f32, comm, nullptr) == invalid_argument, "refused");
  require(nccl.counts().calls_after_end == 1, "counted");
}

// An asynchronous error is seen by a query only; then every call returns it. 2.18 never sees it.
// Destroying such a communicator leaves the thread in a group, since 2.22.
void an_asynchronous_error_stays(const Nccl& nccl) {
  Comm comm = nccl.make(nccl.id(), 0, 1);
  nccl.fail(0, remote_error);
  Queue queue;
  if (nccl.version < 21900) {
    require(nccl.state(comm) == success, "2.18 does not tell");
    nccl.destroy(comm);
    return;
  }
  require(nccl.state(comm) == remote_error, "it is told");
  float value = 1;
  require(nccl.all_reduce(&value, &value, 1, f32, sum, comm, queue) == remote_error,
          "by calls too");
  require(nccl.destroy(comm) == remote_error, "it is not destroyed");
  require(nccl.counts().groups_left_open == 1, "and the thread is left in a group");
  nccl.abort(comm);
  require(nccl.counts().live == 1, "in which the abort waits");
  require(nccl.group_end() == success, "until it ends");
}

void groups_nest_and_keep_errors(const Nccl& nccl) {
  require(nccl.group_end() == invalid_usage, "no group is open");
  Comm comm = nccl.make(nccl.id(), 0, 1);
  Queue queue;
  float value = 1;
  float result = 0;
  nccl.group_start();
  nccl.group_start();
  require(nccl.all_reduce(&value, &result, 1, f32, sum, comm, queue) == success, "collected");
  require(nccl.group_end() == success, "the inner end does nothing");
  queue.finish();
  require(result == 0, "nothing was launched");
  require(nccl.group_end() == success, "the outer one launches");
  queue.finish();
  require(result == 1, "launched");
  nccl.group_start();
  require(nccl.send(&value, 1, f32, 7, comm, queue) == invalid_argument, "no such peer");
  require(nccl.all_reduce(&value, &result, 1, f32, sum, comm, queue) == success, "collected");
  require(nccl.group_end() == invalid_argument, "the error is kept");
  nccl.destroy(comm);
}

void blocking_modes_do_not_mix(const Nccl& nccl) {
  Config config;
  Comm a = nullptr;
  Comm b = nullptr;
  nccl.group_start();
  require(nccl.init(&a, 1, nccl.id(), 0, &config) == success, "the first");
  config.blocking = 0;
  require(nccl.init(&b, 1, nccl.id(), 0, &config) == invalid_argument && b == nullptr, "not both");
  require(nccl.group_end() == invalid_argument, "the group fails");
  require(nccl.counts().mixed_modes == 1, "counted");
  nccl.abort(a);
}

// The old transport's mistake: a split of a non-blocking communicator returns success, with its
// handle null until the parent's state is success.
void a_non_blocking_split_returns_success_and_null(const Nccl& nccl) {
  Config config;
  config.blocking = 0;
  const Id id = nccl.id();
  std::atomic<int> split{0};
  on_ranks([&](int rank) {
    Comm parent = nullptr;
    require(nccl.init(&parent, kRanks, id, rank, &config) == in_progress, "init is in progress");
    require(parent != nullptr, "with its handle");
    require(nccl.settle(parent) == success, "connected");
    Comm child = nullptr;
    if (rank != 0) await(split, 1);
    require(nccl.split(parent, 0, rank, &child, &config) == success, "which is not done");
    if (rank == 0) {
      Comm now = nullptr;
      __atomic_load(&child, &now, __ATOMIC_ACQUIRE);
      require(now == nullptr, "null until done");
      require(nccl.state(parent) == in_progress, "as the parent says");
      int size = 0;
      require(nccl.count(parent, &size) == invalid_argument, "and it takes no call");
      ++split;
    }
    require(nccl.settle(parent) == success, "done");
    require(child != nullptr && nccl.state(child) == success, "there");
    Queue queue;
    std::vector<float> all(kRanks);
    const float mine = 1;
    const Result result = nccl.all_gather(&mine, all.data(), 1, f32, child, queue);
    require(result == in_progress || result == success, "under way");
    require(nccl.settle(child) == success, "launched");
    queue.finish();
    nccl.destroy(child);
    nccl.destroy(parent);
  });
  require(nccl.counts().calls_in_progress == 1, "and counted");
}

struct Registered {
  Result result = success;
  void* window = nullptr;
  bool on_device = false;
};

Registered register_window(const Nccl& nccl, Comm comm, void* data, std::size_t bytes) {
  Registered made;
  made.result = nccl.window_register(comm, data, bytes, &made.window, 1);
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, made.window);
  made.on_device = attributes.type == cudaMemoryTypeDevice;
  return made;
}

void windows(const Nccl& nccl, FakeWindows support, bool cumem) {
  if (nccl.version < 22700) return;
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    void* data = nullptr;
    nccl.mem_alloc(&data, 1024);
    const Registered made = register_window(nccl, comm, data, 1024);
    require(made.result == success, "in any case");
    const bool symmetric = cumem && support == FakeWindows::symmetric;
    const bool structure = nccl.version < 22800;
    const bool handle = nccl.version < 22900;
    const bool local = support != FakeWindows::none && (cumem || !structure);
    require((made.window != nullptr) == (symmetric || (local && handle)), "what there is");
    require(made.on_device == (symmetric && !structure), "and where");
    void* buffer = nullptr;
    nccl.comm_register(comm, data, 1024, &buffer);
    require((buffer != nullptr) == (support != FakeWindows::none), "NCCL_LOCAL_REGISTER");

    Queue queue;
    const std::uint16_t kOne = 0x3f80;
    const std::uint16_t k256 = 0x4380;
    auto* parts = static_cast<std::uint16_t*>(data);
    for (int i = 0; i < kRanks; ++i) parts[i] = rank == 1 ? k256 : kOne;
    nccl.reduce_scatter(parts, parts + 64, 1, bf16, sum, comm, queue);
    nccl.all_gather(parts + 64, parts + 128, 1, bf16, comm, queue);
    queue.finish();
    if (symmetric) require(parts[64] == 0x4381, "symmetric kernels sum in fp32");
    require(nccl.comm_deregister(comm, buffer) == success, "deregistered");
    require(nccl.window_deregister(comm, made.window) == success, "deregistered");
    nccl.mem_free(data);
    nccl.destroy(comm);
  });
  const FakeNcclCounts counts = nccl.counts();
  const int expected = cumem && support == FakeWindows::symmetric ? kRanks : 0;
  require(counts.scatters_symmetric == expected && counts.gathers_symmetric == expected, "kernels");
  require(counts.windows_symmetric == expected, "windows");
  require_clean(nccl);
}

void copy_engines_gather_on_demand(const Nccl& nccl) {
  if (nccl.version < 22800) return;
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Config config;
    config.cta_policy = 2;
    Comm comm = nccl.make(id, rank, kRanks, config);
    void* data = nullptr;
    nccl.mem_alloc(&data, 1024);
    void* window = nullptr;
    nccl.window_register(comm, data, 1024, &window, 1);
    auto* all = static_cast<float*>(data);
    Queue queue;
    nccl.all_gather(all + rank, all, 1, f32, comm, queue);
    nccl.all_gather(&rank, all, 1, f32, comm, queue);
    queue.finish();
    nccl.window_deregister(comm, window);
    nccl.mem_free(data);
    nccl.destroy(comm);
  });
  const int one_window = nccl.version >= 23000 ? kRanks : 0;
  require(nccl.counts().gathers_copy_engine == kRanks + one_window, "both in windows, until 2.30");
}

void registered_memory_is_watched(const Nccl& nccl) {
  if (nccl.version < 21900) return;
  Comm comm = nccl.make(nccl.id(), 0, 1);
  void* data = nullptr;
  void* handle = nullptr;
  nccl.mem_alloc(&data, 64);
  nccl.comm_register(comm, data, 64, &handle);
  void* again = nullptr;
  nccl.comm_register(comm, data, 32, &again);
  require(again == handle, "one handle for one range");
  require(nccl.comm_deregister(comm, handle) == success, "once");
  nccl.mem_free(data);
  require(nccl.counts().freed_while_registered == 1, "freed");
  nccl.destroy(comm);
  require(nccl.counts().registered_at_destroy == 1, "and left");
}

// A graph that holds a collective keeps its communicator from ending.
void a_graph_holds_its_communicator(const Nccl& nccl) {
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nccl.make(id, rank);
    Queue queue;
    std::vector<float> all(kRanks);
    float mine = 0;
    cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal);
    require(nccl.all_gather(&mine, all.data(), 1, f32, comm, queue) == success, "captured");
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(queue, &graph) == cudaSuccess, "ended");
    cudaGraphExec_t executable = nullptr;
    cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    for (int round = 1; round <= 3; ++round) {
      mine = static_cast<float>(round * (rank + 1));
      cudaGraphLaunch(executable, queue);
      queue.finish();
      require(all[2] == static_cast<float>(3 * round), "gathered by each launch");
    }
    std::atomic<bool> ended{false};
    std::thread destroyer([&] {
      nccl.destroy(comm);
      ended = true;
    });
    std::this_thread::yield();
    require(!ended, "it waits");
    cudaGraphExecDestroy(executable);
    destroyer.join();
  });
  require_clean(nccl);
}

void two_threads_in_one_communicator_are_counted(const Nccl& nccl) {
  const Id id = nccl.id();
  Comm comm = nccl.make(id, 0, 1);
  Queue queue;
  std::atomic<bool> done{false};
  const auto calls = [&] {
    float value = 1;
    Queue own;
    for (int i = 0; i < 100000 && !done; ++i) {
      nccl.all_reduce(&value, &value, 1, f32, sum, comm, own);
      if (nccl.counts().concurrent_calls > 0) done = true;
    }
    own.finish();
  };
  std::thread other(calls);
  calls();
  other.join();
  require(nccl.counts().concurrent_calls > 0, "counted");
  nccl.destroy(comm);
}

void faults_are_returned(const Nccl& nccl) {
  Comm comm = nccl.make(nccl.id(), 0, 1);
  FakeNccl faults;
  faults.fails = FakeCall::all_gather;
  faults.fails_with = remote_error;
  nccl.set(&faults);
  float value = 1;
  require(nccl.all_gather(&value, &value, 1, f32, comm, nullptr) == remote_error, "returned");
  nccl.destroy(comm);
}

void absent_ranks_block_until_aborted(const Nccl& nccl, bool finishing) {
  FakeNccl faults;
  (finishing ? faults.never_finishes_init : faults.never_inits) = 0;
  nccl.set(&faults);
  const Id id = nccl.id();
  on_ranks([&](int rank) {
    Comm comm = nullptr;
    std::thread blocked([&] {
      Config config;
      require(nccl.init(&comm, kRanks, id, rank, &config) == internal_error, "aborted");
    });
    Comm seen = nullptr;
    while (seen == nullptr) __atomic_load(&comm, &seen, __ATOMIC_ACQUIRE);
    nccl.group_start();
    nccl.abort(seen);
    blocked.join();
    nccl.group_end();
  });
}

void nothing_is_done_in_an_instant(const Nccl& nccl) {
  nccl.instant(1);
  Comm comm = nccl.make(nccl.id(), 0, 4);
  float value = 7;
  require(nccl.all_reduce(&value, &value, 1, f32, sum, comm, nullptr) == success, "at once");
  require(nccl.destroy(comm) == success && value == 7, "without peers or effect");
  nccl.instant(0);
}

}  // namespace

int main(int, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const Nccl nccl(arguments[1]);
  std::printf("NCCL %d\n", nccl.version);
  run("symbols", nccl, symbols_are_those_of_the_version);
  run("collectives", nccl, collectives);
  run("bytes", nccl, bytes_are_counted_by_ranks);
  run("rounding", nccl, a_ring_rounds_at_each_hop);
  run("configurations", nccl, configurations_are_checked);
  run("aborted init", nccl, a_blocking_init_is_aborted_by_another_thread);
  run("two inits", nccl, two_inits_in_one_group);
  FakeNccl eager;
  eager.eager_connect = true;
  FakeNccl without_cumem;
  without_cumem.cumem = false;
  for (const FakeNccl& faults : {FakeNccl(), eager, without_cumem}) {
    const bool connected = faults.eager_connect || !faults.cumem;
    const auto test = [&](const Nccl& each) {
      connections_are_made_by_the_first_call(each, connected);
    };
    run("connections", nccl, test, faults);
  }
  run("abort in a group", nccl, an_abort_in_a_group_frees_at_its_end);
  run("abort and kernels", nccl, an_abort_ends_kernels);
  run("use after the end", nccl, use_after_the_end_is_counted);
  run("asynchronous error", nccl, an_asynchronous_error_stays);
  run("groups", nccl, groups_nest_and_keep_errors);
  run("modes", nccl, blocking_modes_do_not_mix);
  run("split", nccl, a_non_blocking_split_returns_success_and_null);
  for (const auto support : {FakeWindows::none, FakeWindows::local, FakeWindows::symmetric}) {
    for (const bool cumem : {true, false}) {
      FakeNccl faults;
      faults.windows = support;
      faults.cumem = cumem;
      run("windows", nccl, [&](const Nccl& each) { windows(each, support, cumem); }, faults);
    }
  }
  run("copy engines", nccl, copy_engines_gather_on_demand);
  run("registered memory", nccl, registered_memory_is_watched);
  run("graphs", nccl, a_graph_holds_its_communicator);
  run("two threads", nccl, two_threads_in_one_communicator_are_counted);
  run("faults", nccl, faults_are_returned);
  for (const bool finishing : {false, true}) {
    run("absent ranks", nccl,
        [&](const Nccl& each) { absent_ranks_block_until_aborted(each, finishing); });
  }
  run("instant", nccl, nothing_is_done_in_an_instant);
  std::puts("good");
  return 0;
}
