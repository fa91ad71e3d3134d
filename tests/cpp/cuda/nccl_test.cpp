// The NCCL transport under the sanitizers, without a GPU: its own code, and a CUDA runtime and an
// NCCL that threads of this process play. What it cannot show is what the real ones do.
#include "shardcomm/nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"
#include "fake_nccl.h"
#include "stream/wait_check.h"

namespace {

using namespace shardcomm;
using Clock = std::chrono::steady_clock;
using Comm = std::shared_ptr<Communicator>;

constexpr int kRanks = 3;
void (*set_fake)(const FakeNccl*) = nullptr;
void (*get_fake)(FakeNccl*) = nullptr;

void require(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim.c_str());
  std::_Exit(1);
}

void require_text(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "'" + text + "' contains '" + part + "'");
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::string comm_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    return error.what();
  }
  require(false, "it throws CommError");
  return "";
}

// A rank's stream, with the host waiting for it.
class Queue {
 public:
  explicit Queue(const Comm& comm) : stream_(make_cuda_stream(comm->rank())) {}
  NativeStream get() const { return stream_->native(); }
  void finish() const { cudaStreamSynchronize(static_cast<cudaStream_t>(get())); }
  Stream& stream() { return *stream_; }

 private:
  std::unique_ptr<Stream> stream_;
};

void on_ranks(const char* name, double deadline_s, const FakeNccl& fake,
              const std::function<void(Comm)>& body) {
  std::printf("%s\n", name);
  set_fake(&fake);
  const std::string id = nccl_unique_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      cudaSetDevice(rank);
      body(make_nccl(id, rank, kRanks, rank, {deadline_s}));
    });
  }
  for (std::thread& thread : threads) thread.join();
  FakeNccl counts;
  get_fake(&counts);
  require(counts.live == 0, "all communicators were destroyed or aborted");
  require(counts.misused == 0, "NCCL was used as it may be");
}

void collectives(const Comm& comm) {
  const int rank = comm->rank();
  const auto mine = static_cast<float>(rank + 1);
  constexpr int kPart = 100;
  Queue queue(comm);
  for (int round = 0; round < 20; ++round) {
    const auto window = comm->allocate(kRanks * kPart * sizeof(float), Use::gather);
    const auto own = comm->allocate(kRanks * kPart * sizeof(float), Use::reduce);
    auto* full = static_cast<float*>(window->data());
    require(std::all_of(full, full + kRanks * kPart, [](float x) { return x == 0; }), "zero");
    require(window->device() == rank, "memory knows its device");
    std::fill_n(full + rank * kPart, kPart, mine);
    comm->all_gather(full + rank * kPart, DType::f32, full, DType::f32, kPart, 0, queue.get());
    queue.finish();
    for (int i = 0; i < kRanks * kPart; ++i) require(full[i] == 1 + i / kPart, "gathered");

    const std::vector<float> shard(kPart, mine);
    std::vector<std::uint16_t> narrow(kRanks * kPart);
    comm->all_gather(shard.data(), DType::f32, narrow.data(), DType::bf16, kPart, 0, queue.get());
    queue.finish();
    require(narrow[0] == 0x3f80 && narrow[kPart] == 0x4000, "gathered and converted");

    std::vector<float> result(kPart, 10);
    comm->reduce_scatter(full, DType::f32, result.data(), {}, kPart, RedOp::sum, 0, queue.get());
    comm->reduce_scatter(full, DType::f32, result.data(), {DType::f32, 0.5f, true}, kPart,
                         RedOp::sum, 0, queue.get());
    comm->reduce_scatter(narrow.data(), DType::bf16, result.data(), {DType::f32, 1.0f, true}, kPart,
                         RedOp::sum, 0, queue.get());
    queue.finish();
    require(result[kPart - 1] == 2.5f * kRanks * mine, "reduced, scaled, accumulated, exchanged");

    // Plainly, with something to do, and exchanged.
    for (const Epilogue& each : {Epilogue{}, Epilogue{DType::f32, 0.5f, true}}) {
      for (const bool exchanged : {false, true}) {
        std::int32_t nonfinite = 0;
        Epilogue epilogue = each;
        epilogue.nonfinite = &nonfinite;
        for (const bool bad : {false, true}) {
          result.assign(kPart, 0);
          full[0] = bad ? std::numeric_limits<float>::infinity() : 1.0f;
          narrow[0] = bad ? 0x7f80 : 0x3f80;
          const void* send = exchanged ? static_cast<const void*>(narrow.data()) : full;
          comm->reduce_scatter(send, exchanged ? DType::bf16 : DType::f32, result.data(), epilogue,
                               kPart, RedOp::sum, 0, queue.get());
          queue.finish();
          require(nonfinite == (bad && rank == 0), "the flag tells of this rank's part");
        }
      }
    }

    std::vector<float> value(5, mine);
    comm->all_reduce(value.data(), DType::f32, 5, RedOp::max, queue.get());
    queue.finish();
    require(value[4] == kRanks, "reduced on all");
    value[0] = mine;
    comm->broadcast(value.data(), sizeof(float), 1, queue.get());
    comm->barrier(0, queue.get());
    queue.finish();
    require(value[0] == 2, "broadcast");
    comm->all_gather(nullptr, DType::f32, nullptr, DType::f32, 0, 0, queue.get());
  }
}

void collectives_and_memory_that_outlives(const Comm& comm, const char* path) {
  collectives(comm);
  for (const Receipt& receipt : comm->receipts()) {
    if (receipt.operation == "allocate") require(receipt.taken == path, "memory's path");
    if (receipt.operation == "reduce_scatter") require(receipt.taken == "exchange", "bf16's path");
    if (receipt.operation == "barrier") require(receipt.sequence == 119, "calls are numbered");
  }
  const auto memory = comm->allocate(64, Use::gather);
  comm->close();
  comm->close();
  require_text(comm_error([&] { comm->barrier(); }), "has closed the communicator");
  require(static_cast<char*>(memory->data())[63] == 0, "memory outlives");
}

void gathers_and_reduces_at_once(const Comm& comm) {
  Queue gathers(comm);
  Queue reduces(comm);
  std::vector<float> full(kRanks * 64);
  std::vector<float> value(64, 1);
  std::thread thread([&] {
    const std::vector<float> shard(64, static_cast<float>(comm->rank()));
    for (int i = 0; i < 400; ++i) {
      comm->all_gather(shard.data(), DType::f32, full.data(), DType::f32, 64, 0, gathers.get());
    }
    gathers.finish();
  });
  for (int i = 0; i < 400; ++i) {
    comm->all_reduce(value.data(), DType::f32, 64, RedOp::max, reduces.get());
  }
  thread.join();
  reduces.finish();
  require(full.back() == kRanks - 1 && value[0] == 1, "both are right");
}

// More than are watched at once, behind computation that takes longer than the deadline.
void waiting_for_computation_is_not_late(const Comm& comm) {
  Queue queue(comm);
  std::vector<float> value(8, 1);
  fake_enqueue(static_cast<cudaStream_t>(queue.get()),
               [] { std::this_thread::sleep_for(std::chrono::milliseconds(1500)); });
  for (int i = 0; i < 600; ++i) {
    comm->all_reduce(value.data(), DType::f32, 8, RedOp::max, queue.get());
  }
  queue.finish();
  comm->barrier(0, queue.get());
  queue.finish();
}

void late_rank_ends_the_others(const Comm& comm) {
  Queue queue(comm);
  std::vector<float> value(8, 1);
  auto memory = comm->allocate(64, Use::gather);
  if (comm->rank() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    return;
  }
  const auto begin = Clock::now();
  comm->all_reduce(value.data(), DType::f32, 8, RedOp::sum, queue.get());
  queue.finish();  // its kernel was ended
  require(seconds_since(begin) < 1.9, "the stream drains at the deadline");
  const std::string error = comm_error([&] { comm->barrier(0, queue.get()); });
  require_text(error, "all_reduce(f32, count 8, sum) #1 did not complete in 0.5 s");
  require(error == comm_error([&] { comm->allocate(8, Use::reduce); }), "the first failure stays");
}

void abort_ends_streams_that_wait_for_each_other(const Comm& comm) {
  Queue gathers(comm);
  Queue reduces(comm);
  float value = 1;
  if (comm->rank() == 0) {
    comm->all_reduce(&value, DType::f32, 1, RedOp::sum, reduces.get());
    gathers.stream().wait(reduces.stream().record());
    comm->barrier(0, gathers.get());
  }
  comm->abort("enough");
  gathers.finish();
  const std::string error = comm_error([&] { comm->barrier(); });
  require(error == "rank " + std::to_string(comm->rank()) + " of 3: aborted: enough", error);
}

void memory_that_one_rank_has_not_is_an_error_on_all(const Comm& comm) {
  const std::size_t bytes = comm->rank() == 1 ? std::size_t{1} << 41 : 64;
  const std::string error = comm_error([&] { comm->allocate(bytes, Use::gather); });
  require_text(error, comm->rank() == 1 ? "ncclMemAlloc" : "another rank has not so much memory");
}

void interrupted_call_ends_the_communicator(const Comm& comm) {
  struct Interrupt {};
  if (comm->rank() != 0) return;
  try {
    const WaitCheck check([] { throw Interrupt{}; });
    comm->allocate(64, Use::gather);
    require(false, "it is interrupted");
  } catch (const Interrupt&) {
  }
  require_text(comm_error([&] { comm->barrier(); }),
               "allocate(64 bytes, gather) #1 was interrupted");
}

// The closer holds a lock that the other thread's check_wait wants, as Python's.
void close_ends_a_call_under_way(const Comm& comm) {
  if (comm->rank() != 0) return comm->abort("not needed");
  std::mutex interpreter;
  std::thread closer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const std::lock_guard<std::mutex> lock(interpreter);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    comm->close();
  });
  const WaitCheck check([&] { const std::lock_guard<std::mutex> lock(interpreter); });
  float value = 1;
  Queue queue(comm);
  require_text(
      comm_error([&] { comm->all_reduce(&value, DType::f32, 1, RedOp::sum, queue.get()); }),
      "all_reduce(f32, count 1, sum) #1 was under way when the communicator was closed");
  closer.join();
}

void absent_rank_is_an_error_at_the_deadline() {
  std::puts("absent rank");
  const auto begin = Clock::now();
  require_text(comm_error([] { make_nccl(nccl_unique_id(), 0, 2, 0, {0.3}); }),
               "rank 0 of 2: attach() #0 did not complete in 0.3 s");
  require(seconds_since(begin) < 5, "it does not hang");
}

// Somebody else's communicators, by NCCL's own calls.
class Owners {
 public:
  explicit Owners(void* library) : library_(library) {
    struct Id {
      char bytes[128];
    } id;
    struct Config {
      std::size_t size = 48;
      unsigned magic = 0xcafebeef;
      unsigned version = 21801;
      int blocking = 0;
      char rest[28] = {};
    } config;
    nccl_unique_id().copy(id.bytes, sizeof(id.bytes));
    const auto make = find<int(void**, int, Id, int, Config*)>("ncclCommInitRankConfig");
    const auto ask = find<int(void*, int*)>("ncclCommGetAsyncError");
    for (int rank = 0; rank < kRanks; ++rank) make(&comms_[rank], kRanks, id, rank, &config);
    for (void* comm : comms_) {
      for (int state = 7; state == 7; ask(comm, &state)) std::this_thread::yield();
    }
  }
  ~Owners() {
    for (void* comm : comms_) find<int(void*)>("ncclCommAbort")(comm);
  }
  Owners(const Owners&) = delete;
  Owners& operator=(const Owners&) = delete;
  std::uintptr_t of(int rank) const { return reinterpret_cast<std::uintptr_t>(comms_[rank]); }

 private:
  template <class Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }
  void* library_;
  void* comms_[kRanks] = {};
};

void borrowed_ranks(void* library, bool blocking) {
  std::puts(blocking ? "borrowed, blocking" : "borrowed");
  FakeNccl fake;
  fake.blocking_parent = blocking;
  set_fake(&fake);
  const Owners owners(library);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&owners, rank] {
      cudaSetDevice(rank);
      collectives(borrow_nccl(owners.of(rank), rank, {20}));
    });
  }
  for (std::thread& thread : threads) thread.join();
  get_fake(&fake);
  require(fake.live == kRanks && fake.misused == 0, "the owners' are left, and usable");
  if (blocking) return;  // who owns it must end it, and cannot while it blocks
  require_text(comm_error([&] { borrow_nccl(owners.of(0), 0, {0.3}); }),
               "attach() #0 did not complete in 0.3 s");
}

}  // namespace

int main(int, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const NcclStatus status = nccl_status({arguments[1]});
  require(status.available, status.reason);
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD);
  set_fake = reinterpret_cast<decltype(set_fake)>(dlsym(library, "fake_nccl_set"));
  get_fake = reinterpret_cast<decltype(get_fake)>(dlsym(library, "fake_nccl_get"));

  FakeNccl fake;
  on_ranks("collectives", 20, fake,
           [](const Comm& comm) { collectives_and_memory_that_outlives(comm, "window"); });
  fake.no_window = true;
  on_ranks("no windows", 20, fake,
           [](const Comm& comm) { collectives_and_memory_that_outlives(comm, "buffer"); });
  fake = {};
  on_ranks("both channels", 20, fake, gathers_and_reduces_at_once);
  on_ranks("behind computation", 1, fake, waiting_for_computation_is_not_late);
  on_ranks("late rank", 0.5, fake, late_rank_ends_the_others);
  on_ranks("abort", 20, fake, abort_ends_streams_that_wait_for_each_other);
  on_ranks("no memory", 20, fake, memory_that_one_rank_has_not_is_an_error_on_all);
  on_ranks("interrupt", 20, fake, interrupted_call_ends_the_communicator);
  fake.never_launches = true;
  on_ranks("close", 20, fake, close_ends_a_call_under_way);
  set_fake(&(fake = {}));
  absent_rank_is_an_error_at_the_deadline();
  borrowed_ranks(library, false);
  borrowed_ranks(library, true);
  std::puts("good");
  return 0;
}
