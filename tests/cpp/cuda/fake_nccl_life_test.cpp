// The played NCCL does what its profile's sources do where communicators come about, wait, fail and
// end: each test is a way in which a transport has been wrong, or could be.
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "fake_nccl_calls.h"

namespace {

using namespace calls;

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

// What looks at no abort flag ends when its peers come; the abort waits for that.
void an_abort_does_not_end_every_kernel(const Nccl& nccl, bool copy_engines) {
  if (nccl.version < (copy_engines ? 22800 : 22700)) return;
  const bool ends = !copy_engines && nccl.version >= 22907;
  const Id id = nccl.id();
  std::atomic<int> go{ends ? 1 : 0};
  on_ranks([&](int rank) {
    Config config;
    if (copy_engines) config.cta_policy = 2;
    Comm comm = nccl.make(id, rank, kRanks, config);
    void* data = nullptr;
    nccl.mem_alloc(&data, 1024);
    void* window = nullptr;
    nccl.window_register(comm, data, 1024, &window, 1);
    auto* all = static_cast<float*>(data);
    all[rank] = 1;
    if (rank != 0) await(go, 1);
    Queue queue;
    if (rank == 0 || !ends) nccl.all_gather(all + rank, all, 1, f32, comm, queue);
    std::atomic<bool> ended{false};
    std::thread aborts([&] {
      if (rank != 0) queue.finish();
      nccl.abort(comm);
      ended = true;
    });
    if (rank == 0 && !ends) {
      while (nccl.counts().aborts == 0) std::this_thread::yield();
      using Clock = std::chrono::steady_clock;
      for (const auto end = Clock::now() + std::chrono::milliseconds(2); Clock::now() < end;) {
        std::this_thread::yield();
      }
      require(!ended, "the kernel waits for its peers, and the abort for it");
      ++go;
    }
    aborts.join();
    queue.finish();
    require(ends || all[0] + all[1] + all[2] == kRanks, "gathered all the same");
    nccl.mem_free(data);
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

// The old transport's mistake: a split of a non-blocking communicator returns success, with its
// handle null until the parent's state is success.
void a_non_blocking_split_returns_success_and_null(const Nccl& nccl) {
  Config config;
  config.blocking = 0;
  const Id id = nccl.id();
  std::atomic<int> begun{0};
  std::atomic<int> split{0};
  on_ranks([&](int rank) {
    Comm parent = nullptr;
    if (rank != 0) await(begun, 1);
    const Result made = nccl.init(&parent, kRanks, id, rank, &config);
    if (rank == 0) require(made == in_progress, "init is in progress without the others");
    ++begun;
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

}  // namespace

int main(int, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const Nccl nccl(arguments[1]);
  std::printf("NCCL %d\n", nccl.version);
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
  for (const bool copy_engines : {false, true}) {
    run("abort and windows", nccl,
        [&](const Nccl& each) { an_abort_does_not_end_every_kernel(each, copy_engines); });
  }
  run("use after the end", nccl, use_after_the_end_is_counted);
  run("asynchronous error", nccl, an_asynchronous_error_stays);
  run("split", nccl, a_non_blocking_split_returns_success_and_null);
  run("graphs", nccl, a_graph_holds_its_communicator);
  run("two threads", nccl, two_threads_in_one_communicator_are_counted);
  for (const bool finishing : {false, true}) {
    run("absent ranks", nccl,
        [&](const Nccl& each) { absent_ranks_block_until_aborted(each, finishing); });
  }
  std::puts("good");
  return 0;
}
