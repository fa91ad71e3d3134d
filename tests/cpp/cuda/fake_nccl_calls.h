// NCCL's calls, loaded and made as a transport does, and ranks that are threads.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"
#include "fake_nccl.h"

namespace calls {

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

inline void require(bool holds, const std::string& claim) {
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
  FIND(reduce, "ncclReduce", const void*, void*, std::size_t, DType, Op, int, Comm, cudaStream_t);
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

inline void on_ranks(const std::function<void(int)>& body, int size = kRanks) {
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
inline void run(const char* name, const Nccl& nccl, const std::function<void(const Nccl&)>& test,
                const FakeNccl& faults = {}) {
  std::printf("%s\n", name);
  nccl.set(&faults);
  nccl.reset();
  test(nccl);
  require(nccl.counts().live == 0, "no communicator is left");
}

inline void require_clean(const Nccl& nccl) {
  require(nccl.counts().misused() == 0, "nothing is misused");
}

inline float gathered(const Nccl& nccl, Comm comm, int rank, const Queue& queue) {
  std::vector<float> all(kRanks);
  const auto mine = static_cast<float>(rank + 1);
  require(nccl.all_gather(&mine, all.data(), 1, f32, comm, queue) == success, "a gather");
  queue.finish();
  return all[0] + 10 * all[1] + 100 * all[2];
}

}  // namespace calls
