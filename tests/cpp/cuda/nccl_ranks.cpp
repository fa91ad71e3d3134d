#include "nccl_ranks.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace shardcomm::test {
namespace {

void* library = nullptr;

template <class Function>
Function* find(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(library, name));
  require(function != nullptr, std::string("the played NCCL has ") + name);
  return function;
}

}  // namespace

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

std::uint16_t bf16_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}

Receipt receipt(const Comm& comm, const std::string& operation) {
  for (const Receipt& each : comm->receipts()) {
    if (each.operation == operation) return each;
  }
  require(false, "there is a receipt of " + operation);
  return {};
}

void load(const char* path) {
  const NcclStatus status = nccl_status({path});
  require(status.available, status.reason);
  require(status.path == path, status.path + " is the NCCL of this test");
  library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
}

int version() { return nccl_status().version; }

FakeNcclCounts counts() {
  FakeNcclCounts counts;
  find<void(FakeNcclCounts*)>("fake_nccl_get")(&counts);
  return counts;
}

void set(const FakeNccl& fake) { find<void(const FakeNccl*)>("fake_nccl_set")(&fake); }

std::uint64_t bytes_sent(int from, int to) {
  return find<unsigned long long(int, int)>("fake_nccl_bytes")(from, to);
}

void async_error(int rank, int result) {
  find<void(int, int)>("fake_nccl_async_error")(rank, result);
}

void in_threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&body, rank] {
      cudaSetDevice(rank);
      body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void require_nothing_left() {
  // What a graph held on to ends when the graph has, on a thread of the transport's.
  const auto begin = Clock::now();
  while (counts().live != 0 && seconds_since(begin) < 20) std::this_thread::yield();
  const FakeNcclCounts now = counts();
  require(now.live == 0, std::to_string(now.live) + " communicators are left");
  require(now.misused() == 0,
          "NCCL was used as it may be: " + std::to_string(now.concurrent_calls) + " at once, " +
              std::to_string(now.calls_after_end) + " after the end, " +
              std::to_string(now.ended_under_call) + " ended under a call, " +
              std::to_string(now.registered_at_destroy) + " registered at destroy, " +
              std::to_string(now.freed_while_registered) + " freed while registered, " +
              std::to_string(now.groups_left_open) + " groups left open, " +
              std::to_string(now.bad_arguments) + " bad arguments, " +
              std::to_string(now.one_sided_messages) + " one-sided messages");
}

void on_ranks(const char* name, const Setting& setting, const std::function<void(Comm)>& body) {
  std::printf("%s\n", name);
  find<void()>("fake_nccl_reset")();
  set(setting.fake);
  const std::string id = nccl_unique_id();
  Latch connected(setting.ranks);
  Latch faulty(setting.ranks);
  in_threads(setting.ranks, [&](int rank) {
    const std::string host = setting.host ? setting.host(rank) : "one";
    const NcclOptions options{setting.deadline_s, setting.cta_policy, host};
    const Comm comm = make_nccl(id, rank, setting.ranks, rank, options);
    connected.arrive_and_wait();
    if (rank == 0) set(setting.connected);
    faulty.arrive_and_wait();
    body(comm);
  });
  require_nothing_left();
  set({});
}

}  // namespace shardcomm::test
