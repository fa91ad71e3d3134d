// The NCCL transport when something fails: every wait ends, with a sentence, on every rank; and no
// communicator is freed under a call or left behind.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "nccl_ranks.h"
#include "stream/wait_check.h"

namespace {

using namespace shardcomm;
using namespace shardcomm::test;

constexpr int kRanks = 3;

// NCCL before 2.22 frees a communicator when it is aborted: a thread that waits in its
// initialisation is left behind.
bool brings_back() { return version() >= 22200; }

// The first one connects, and waits on the host for the others to come to theirs.
void reduce(const Comm& comm, float* value, const Queue& queue) {
  static const std::vector<float> send(kRanks, 1);
  comm->reduce_scatter(send.data(), DType::f32, value, {}, 1, RedOp::sum, 0, queue.get());
}

// Afterwards all of NCCL's connections are there.
void warm_up(const Comm& comm, const Queue& queue) {
  float value = 1;
  reduce(comm, &value, queue);
  comm->barrier(0, queue.get());
  queue.finish();
}

void late_rank_ends_the_others(const Comm& comm) {
  const Queue queue(comm);
  warm_up(comm, queue);
  const auto memory = comm->allocate(64, Use::gather);
  if (comm->rank() == 1) {
    // It comes when the others have given up, and learns it too.
    return require_text(comm_error([&] {
                          float value = 1;
                          std::this_thread::sleep_for(std::chrono::seconds(4));
                          reduce(comm, &value, queue);
                          queue.finish();
                          while (true) comm->barrier(0, queue.get());
                        }),
                        "did not complete in 1 s");
  }
  const auto begin = Clock::now();
  float value = 1;
  reduce(comm, &value, queue);
  queue.finish();  // its kernel was ended
  require(seconds_since(begin) < 3.9, "the stream drains at the deadline");
  const std::string error = comm_error([&] { comm->barrier(0, queue.get()); });
  require_text(error, "reduce_scatter(f32, count 1, sum) #2 did not complete in 1 s");
  require(error == comm_error([&] { comm->allocate(8, Use::reduce); }), "the first failure stays");
}

// The first collective connects, and waits on the host until its peers have come to theirs.
void rank_that_never_connects_ends_the_others(const Comm& comm) {
  const Queue queue(comm);
  float value = 1;
  const auto begin = Clock::now();
  const std::string error = comm_error([&] {
    reduce(comm, &value, queue);
    queue.finish();
    comm->barrier(0, queue.get());
  });
  require(seconds_since(begin) < 10, "it ends at the deadline");
  require_text(error, "#1 did not complete in 1 s");
}

void first_exchange_is_under_the_deadline(const Comm& comm) {
  const Queue queue(comm);
  std::vector<std::uint16_t> send(kRanks, 0x3f80);
  float result = 0;
  if (comm->rank() == 0) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    return comm->abort("not needed");
  }
  const std::string error = comm_error([&] {
    comm->reduce_scatter(send.data(), DType::bf16, &result, {}, 1, RedOp::sum, 0, queue.get());
    queue.finish();
    comm->barrier(0, queue.get());
  });
  require_text(error, "reduce_scatter(bf16, count 1, sum) #1 did not complete in 1 s");
}

void error_of_nccls_own_threads_is_seen(const Comm& comm) {
  const Queue queue(comm);
  warm_up(comm, queue);
  if (comm->rank() == 0) async_error(0, 6);
  if (comm->rank() != 0) return comm->abort("not needed");
  const auto begin = Clock::now();
  const std::string error = comm_error([&] {
    while (seconds_since(begin) < 20) {
      comm->all_gather(nullptr, DType::f32, nullptr, DType::f32, 0, 0, queue.get());
      std::this_thread::yield();
    }
  });
  require_text(error, "NCCL: ");
  require(seconds_since(begin) < 5, "it is seen without a collective");
}

void abort_ends_streams_that_wait_for_each_other(const Comm& comm) {
  const Queue gathers(comm);
  Queue reduces(comm);
  warm_up(comm, gathers);
  float value = 1;
  if (comm->rank() == 0) {
    reduce(comm, &value, reduces);
    borrow_cuda_stream(0, gathers.get())->wait(reduces.stream().record());
    comm->barrier(0, gathers.get());
  }
  comm->abort("enough");
  gathers.finish();
  const std::string error = comm_error([&] { comm->barrier(); });
  require(error == "rank " + std::to_string(comm->rank()) + " of 3: aborted: enough", error);
}

void abort_brings_back_a_call(const Comm& comm) {
  if (comm->rank() != 0) return comm->abort("not needed");
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    comm->abort("enough");
  });
  const Queue queue(comm);
  float value = 1;
  const auto begin = Clock::now();
  const std::string error = comm_error([&] {
    reduce(comm, &value, queue);
    queue.finish();
    comm->barrier(0, queue.get());
  });
  require(error == "rank 0 of 3: aborted: enough", error);
  require(seconds_since(begin) < 10, "long before the deadline");
  other.join();
}

void close_ends_a_call_under_way(const Comm& comm) {
  if (comm->rank() != 0) return comm->abort("not needed");
  std::thread closer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    comm->close();
  });
  const Queue queue(comm);
  float value = 1;
  const std::string error = comm_error([&] {
    reduce(comm, &value, queue);
    queue.finish();
    comm->barrier(0, queue.get());
  });
  // Where connecting waits in the call; else it is under way on the device, up to its deadline.
  require_text(error, brings_back()
                          ? "reduce_scatter(f32, count 1, sum) #1 was under way when the "
                            "communicator was closed"
                          : "reduce_scatter(f32, count 1, sum) #1 did not complete in 1 s");
  closer.join();
}

void memory_that_one_rank_has_not_is_an_error_on_all(const Comm& comm) {
  const std::string error = comm_error([&] { comm->allocate(64, Use::gather); });
  require_text(error, comm->rank() == 1 ? "ncclMemAlloc" : "another rank has not so much memory");
}

void refused_call_ends_the_communicator(const Comm& comm) {
  const Queue queue(comm);
  float value = 1;
  const std::string error = comm_error([&] {
    comm->barrier(0, queue.get());
    reduce(comm, &value, queue);
    queue.finish();
    comm->barrier(0, queue.get());
  });
  require_text(error, comm->rank() == 1 ? "NCCL: " : "did not complete in 1 s");
  const std::string again = comm_error([&] { reduce(comm, &value, queue); });
  require(error == again, "the first failure stays");
}

void refused_window_is_registered_locally(const Comm& comm) {
  const auto memory = comm->allocate(4096, Use::reduce);
  for (const Receipt& each : comm->receipts()) {
    if (each.operation != "allocate") continue;
    require(each.taken == "local", "it is " + each.taken);
    require_text(each.reason, "window registration failed");
  }
  const Queue queue(comm);
  warm_up(comm, queue);
}

struct Interrupt {};

void interrupted_call_ends_the_communicator(const Comm& comm) {
  if (comm->rank() != 0) {
    return require_text(comm_error([&] { comm->allocate(64, Use::gather); }),
                        "did not complete in 1 s");
  }
  try {
    const Queue queue(comm);
    // What it waits for never ends: the channel is behind it.
    float value = 1;
    const WaitCheck check([] { throw Interrupt{}; });
    fake_enqueue(queue.cuda(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(500)); });
    comm->barrier(0, queue.get());
    comm->allocate(64, Use::gather);
    require(value == 2, "it is interrupted");
  } catch (const Interrupt&) {
  }
  require_text(comm_error([&] { comm->barrier(); }),
               "allocate(64 bytes, gather) #2 was interrupted");
}

void two_threads_in_a_channel_are_refused(const Comm& comm) {
  if (comm->rank() != 0) return comm->abort("not needed");
  std::atomic<bool> refused{false};
  const Queue queue(comm);
  float value = 1;
  const auto call = [&](const Queue& own) {
    try {
      reduce(comm, &value, own);
    } catch (const std::invalid_argument& error) {
      require_text(error.what(), "in use by another thread");
      refused = true;
      comm->abort("seen");
    } catch (const CommError&) {
    }
  };
  const Queue other_queue(comm);
  std::thread other([&] { call(other_queue); });
  call(queue);
  other.join();
  if (brings_back()) require(refused, "one of them is");  // the other one waits to connect
  comm->abort("enough");
}

// Messages between ranks want registered memory on both sides, or on neither.
void registration_is_of_all_ranks(const Comm& comm) {
  const auto memory = comm->allocate(60000, Use::reduce);
  require(receipt(comm, "allocate").taken == "plain", "no rank has it");
  const Queue queue(comm);
  std::vector<float> result(10000);
  comm->reduce_scatter(memory->data(), DType::bf16, result.data(), {}, 10000, RedOp::sum, 0,
                       queue.get());
  queue.finish();
}

// NCCL cannot end what runs in windows (tests/cpp/cuda/fake_nccl/profile.h, kAbortsSymmetric): the
// process ends, with a sentence, and until then a program gets its errors and may close.
void what_cannot_be_aborted_ends_the_process(CtaPolicy policy) {
  int pipes[2];
  require(pipe(pipes) == 0, "a pipe");
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipes[1], STDERR_FILENO);
    alarm(60);
    Setting setting;
    setting.deadline_s = 2;
    setting.cta_policy = policy;
    on_ranks("gather in windows", setting, [](const Comm& comm) {
      const Queue gathers(comm);
      const Queue reduces(comm);
      warm_up(comm, reduces);
      const auto window = comm->allocate(kRanks * 4096, Use::gather);
      const std::vector<float> shard(1024, 1);
      if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(60));
      comm->all_gather(shard.data(), DType::f32, window->data(), DType::f32, 1024, 0,
                       gathers.get());
      const std::string error = comm_error([&] {
        while (true) {
          comm->check();
          std::this_thread::yield();
        }
      });
      require_text(error, "all_gather(f32, count 1024) #3 did not complete in 2 s");
      comm->close();
      std::fprintf(stderr, "rank %d has closed\n", comm->rank());
      gathers.finish();  // as torch.cuda.synchronize() does
    });
    _exit(0);
  }
  close(pipes[1]);
  std::string text;
  char piece[256];
  for (ssize_t n = 0; (n = read(pipes[0], piece, sizeof(piece))) > 0;) {
    text.append(piece, static_cast<std::size_t>(n));
  }
  close(pipes[0]);
  int status = 0;
  waitpid(child, &status, 0);
  require_text(text, " has closed\n");
  require_text(text,
               "all_gather(f32, count 1024) #3 is still on the GPU 2 s after the abort, and "
               "NCCL 2.");
  require(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "the process ends itself");
}

// It has none of its parent's threads, and locks as they were.
void forked_child_is_refused(const Comm& comm) {
  auto memory = comm->allocate(64, Use::gather);
  if (comm->rank() == 0) {
    const pid_t child = fork();
    if (child == 0) {
      const std::string error = comm_error([&] { comm->barrier(); });
      memory = nullptr;
      comm->abort("not mine");
      comm->close();
      _exit(error.find("this process was forked from the rank's") == std::string::npos);
    }
    int status = 1;
    waitpid(child, &status, 0);
    require(status == 0, "the child is told so, and ends");
  }
  const Queue queue(comm);
  warm_up(comm, queue);
}

// `leaves`: a thread cannot be brought back from NCCL, nor its communicator freed.
void connecting(const char* name, const FakeNccl& fake, const char* expected, bool interrupt,
                bool leaves = !brings_back()) {
  std::printf("%s\n", name);
  set(fake);
  const std::string id = nccl_unique_id();
  const auto begin = Clock::now();
  in_threads(kRanks, [&](int rank) {
    try {
      const WaitCheck check([&] {
        if (interrupt && rank == 0) throw Interrupt{};
      });
      require_text(
          comm_error([&] { make_nccl(id, rank, kRanks, rank, {1, CtaPolicy::standard, "one"}); }),
          expected);
    } catch (const Interrupt&) {
    }
  });
  require(seconds_since(begin) < 10, "it does not hang");
  if (!leaves) require_nothing_left();
  set({});
}

}  // namespace

int main(int, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  load(arguments[1]);
  std::printf("NCCL %d\n", version());
  // First, as this process has no threads yet.
  if (version() >= 22700 && version() < 22907) {
    what_cannot_be_aborted_ends_the_process(CtaPolicy::standard);
  }
  if (version() >= 22800) what_cannot_be_aborted_ends_the_process(CtaPolicy::zero);
  Setting soon;
  soon.deadline_s = 1;
  on_ranks("late rank", soon, late_rank_ends_the_others);
  if (version() >= 22200) {
    Setting never = soon;
    never.connected.never_connects = 1;
    on_ranks("rank that never connects", never, rank_that_never_connects_ends_the_others);
  }
  Setting hanging = soon;
  hanging.connected.kernels_hang = true;
  on_ranks("kernel that hangs", hanging, rank_that_never_connects_ends_the_others);
  on_ranks("first exchange", soon, first_exchange_is_under_the_deadline);
  if (version() >= 21900) on_ranks("error of its threads", {}, error_of_nccls_own_threads_is_seen);
  on_ranks("abort", {}, abort_ends_streams_that_wait_for_each_other);
  on_ranks("abort of a call", {}, abort_brings_back_a_call);
  Setting second;
  second.deadline_s = 1;
  on_ranks("close", second, close_ends_a_call_under_way);
  on_ranks("forked child", {}, forked_child_is_refused);
  on_ranks("two threads", {}, two_threads_in_a_channel_are_refused);
  on_ranks("interrupt", second, interrupted_call_ends_the_communicator);

  Setting refused = soon;
  refused.connected.fails_on = 1;
  refused.connected.fails = FakeCall::all_reduce;
  on_ranks("refused call", refused, refused_call_ends_the_communicator);
  if (version() >= 21900) {
    refused.connected.fails = FakeCall::mem_alloc;
    on_ranks("no memory", refused, memory_that_one_rank_has_not_is_an_error_on_all);
  }
  if (version() >= 22700) {
    Setting windows;
    windows.connected.fails = FakeCall::window_register;
    on_ranks("refused window", windows, refused_window_is_registered_locally);
  }
  if (version() >= 22900) {  // no window is given here; before, it is the handle of a registration
    Setting local;
    local.fake.windows = local.connected.windows = FakeWindows::local;
    local.connected.fails = FakeCall::comm_register;
    local.connected.fails_on = 1;
    on_ranks("refused registration", local, registration_is_of_all_ranks);
  }

  // What this version does not do, and another may.
  Setting eager = soon;
  eager.fake.eager_connect = eager.connected.eager_connect = true;
  on_ranks("eager connections", eager, late_rank_ends_the_others);
  FakeNccl fake;
  fake.fails = FakeCall::init;
  connecting("refused init", fake, "attach() #1", false);
  fake = {};
  fake.never_inits = 1;
  connecting("absent rank", fake, "attach() #1 did not complete in 1 s", false);
  connecting("interrupted init", fake, "attach() #1 did not complete in 1 s", true);
  if (brings_back()) {  // an older one has nobody to end its thread: it is left alone
    setenv("NCCL_COMM_BLOCKING", "0", 1);
    connecting("init that does not block", {}, "NCCL_COMM_BLOCKING=0 in the environment", false);
    unsetenv("NCCL_COMM_BLOCKING");
  }

  fake.late_handle = true;
  connecting("handle null until done", fake, "attach() #1 did not complete in 1 s", false, true);
  std::puts("good");
  return 0;
}
