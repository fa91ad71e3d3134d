// How calls of a communicator are refused, and how they end for all ranks when one of them fails,
// under the sanitizers: `local` between threads, `shm` between forked processes.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/board_communicator.h"
#include "comm/executor.h"
#include "comm/windows.h"
#include "ranks.h"
#include "shardcomm/communicator.h"
#include "shardcomm/stream.h"
#include "stream/wait_check.h"

namespace {

using namespace ranks;

// Those of rank 1 have the same sum and are in another order: all are told of both.
void counts_that_differ_are_refused(Communicator& comm) {
  const bool other = comm.rank() == 1;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(comm.size()), 4);
  counts[0] = other ? 7 : 1;
  counts[1] = other ? 1 : 7;
  const std::vector<float> send(7);
  std::vector<float> recv(64);
  try {
    comm.all_gather(send.data(), DType::f32, recv.data(), DType::f32, Parts(counts));
    require(false, "counts that differ are refused");
  } catch (const CommError& error) {
    const std::string text = error.what();
    for (const char* part : {"gave [1, 7, 4]; rank 1", "gave [7, 1, 4]"}) {
      require(text.find(part) != std::string::npos, text);
    }
  }
}

void a_failure_reaches_all(Communicator& comm) {
  try {
    if (comm.rank() == 1) {
      comm.barrier();
    } else {
      std::vector<float> buffer(4);
      comm.broadcast(buffer.data(), DType::f32, 4, 0);
      comm.barrier();  // a root may have gone on before rank 1 came
    }
    require(false, "ranks that disagree throw");
  } catch (const CommError& error) {
    require(std::string(error.what()).find("rank 1") != std::string::npos, "rank 1 is named");
  }
}

// Ranks go on on streams until one ends the group from outside, in whatever they are then; their
// operands are gone as soon as they have heard.
void an_abort_ends_what_is_under_way(Communicator& comm) {
  const auto gathers = shardcomm::make_thread_stream();
  const auto reduces = shardcomm::make_thread_stream();
  {
    const auto window = comm.allocate(sizeof(float) * 4096, Use::gather);
    std::vector<float> shard(4096 / static_cast<std::size_t>(comm.size()));
    std::vector<float> full(shard.size() * static_cast<std::size_t>(comm.size()));
    std::vector<float> sum(700);
    const auto count = static_cast<std::int64_t>(shard.size());
    for (int i = 0; i < 200; ++i) {
      void* recv = i % 2 ? full.data() : window->data();
      gathers->enqueue([&, recv](shardcomm::NativeStream) {
        comm.all_gather(shard.data(), DType::f32, recv, DType::f32, count);
      });
      reduces->enqueue([&](shardcomm::NativeStream) {
        comm.all_reduce(sum.data(), DType::f32, 700, RedOp::sum);
      });
      if (comm.rank() == 1 && i == 100) comm.abort("that is enough");
    }
    for (const auto* stream : {&gathers, &reduces}) {
      try {
        (*stream)->record()->wait();
        require(false, "an abort reaches every stream");
      } catch (const CommError& error) {
        require(std::string(error.what()).find("that is enough") != std::string::npos,
                "its reason");
      }
    }
  }
}

// A child has copies of the parent's streams and communicators, of which its own end lets go.
void a_forked_child_lets_go() {
  auto group = shardcomm::make_local_group(2);
  auto stream = shardcomm::make_thread_stream();
  std::atomic<bool> go_on{false};
  stream->enqueue([&go_on](shardcomm::NativeStream) {
    while (!go_on) std::this_thread::yield();
  });
  auto event = stream->record();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    try {
      group[0]->barrier();
      _exit(1);
    } catch (const CommError&) {
    }
    group.clear();
    stream = nullptr;
    event = nullptr;
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child lets go of everything");
  go_on = true;
  event->wait();
}

// Each call of rank 1 differs in one thing.
void a_call_that_differs_is_refused(int size, const std::function<void(Communicator&)>& call) {
  on_threads(size, [&](Communicator& comm) {
    try {
      call(comm);
      require(false, "ranks that disagree throw");
    } catch (const CommError& error) {
      const std::string text = error.what();
      require(text.find("ranks called different collectives") == 0, text);
    }
  });
}

void other_dtype_received(Communicator& comm) {
  std::vector<float> send(4), recv(4 * static_cast<std::size_t>(comm.size()));
  const DType dtype = comm.rank() == 1 ? DType::bf16 : DType::f32;
  comm.all_gather(send.data(), DType::f32, recv.data(), dtype, 4);
}

void other_root(Communicator& comm) {
  std::vector<float> buffer(4);
  comm.broadcast(buffer.data(), DType::f32, 4, comm.rank() == 1 ? 1 : 0);
  comm.barrier();  // a root may have gone on before the others came
}

void other_tag(Communicator& comm) { comm.barrier(comm.rank() == 1 ? 7 : 0); }

// Rank 1 is interrupted while it waits; rank 0 has finished its call before, and reads nothing.
void a_rank_that_fails_alone_ends_the_group(Communicator& comm) {
  std::vector<float> shard(4), full(4 * static_cast<std::size_t>(comm.size()));
  comm.all_gather(shard.data(), DType::f32, full.data(), DType::f32, 4);
  if (comm.rank() == 1) {
    try {
      const shardcomm::WaitCheck interrupt([] { throw std::runtime_error("^C"); });
      comm.barrier();
      require(false, "a wait is interrupted");
    } catch (const std::runtime_error&) {
    }
    return;
  }
  try {  // it waits in the other channel until rank 1 has left
    std::vector<float> sum(1);
    comm.all_reduce(sum.data(), DType::f32, 1, RedOp::sum);
    require(false, "rank 1 has left");
  } catch (const CommError& error) {
    const std::string text = error.what();
    require(text.find("rank 1 aborted: barrier: ^C") == 0, text);
  }
}

// As Ctrl-C, of which the others need no more.
struct Interrupted : std::runtime_error, shardcomm::Interruption {
  Interrupted() : std::runtime_error("^C, and where it came") {}
};

void a_rank_that_is_interrupted_says_that_alone(Communicator& comm) {
  try {
    if (comm.rank() == 1) {
      const shardcomm::WaitCheck interrupt([] { throw Interrupted(); });
      comm.barrier();
    } else {  // in the other channel until rank 1 has left
      std::vector<float> sum(1);
      comm.all_reduce(sum.data(), DType::f32, 1, RedOp::sum);
    }
    require(false, "the call ends");
  } catch (const Interrupted&) {
    require(comm.rank() == 1, "rank 1 alone is interrupted");
  } catch (const CommError& error) {
    const std::string text = error.what();
    require(text.find("rank 1 aborted: barrier: interrupted;") == 0, text);
  }
}

// Calls from within a wait, as signal handlers do: both channels refuse, and the outer call goes
// on.
void a_call_within_a_wait_is_refused(Communicator& comm) {
  static std::atomic<int> refused;
  const int before = refused;
  comm.barrier();
  const auto refuses = [](const auto& call, const char* operation) {
    try {
      call();
      require(false, "a call within a wait is refused");
    } catch (const std::invalid_argument& error) {
      const std::string text = error.what();
      require(text.find(std::string(operation) + ": called from a signal handler while this " +
                        "thread is in barrier of the same communicator") == 0,
              text);
    }
  };
  if (comm.rank() == 0) {
    bool called = false;
    const shardcomm::WaitCheck handler([&] {
      if (called) return;
      called = true;
      std::vector<float> sum(1);
      refuses([&] { comm.all_reduce(sum.data(), DType::f32, 1, RedOp::sum); }, "all_reduce");
      refuses([&] { comm.barrier(); }, "barrier");
      ++refused;
    });
    comm.barrier();
    require(called, "the other ranks come after the handler");
  } else {
    while (refused == before) std::this_thread::yield();
    comm.barrier();
  }
}

void what_was_closed_is_not_used() {
  const auto comm = shardcomm::make_local_group(1)[0];
  comm->close();
  try {
    comm->barrier();
    require(false, "a communicator that was closed refuses calls");
  } catch (const CommError&) {
  }
}

// A thread that is still on its way out of a failed call holds its channel.
void who_calls_after_a_failure_hears_of_that() {
  for (int i = 0; i < 20; ++i) {
    const auto comm = shardcomm::make_local_group(2, {60.0})[0];
    const auto stream = shardcomm::make_thread_stream();
    stream->enqueue([&](shardcomm::NativeStream) { comm->barrier(); });
    while (comm->pending().at(0).call.empty()) std::this_thread::yield();
    comm->abort("enough");
    try {
      comm->barrier();
      require(false, "a group that was aborted refuses calls");
    } catch (const CommError&) {
    }
  }
}

void a_buffer_that_leaves_its_window_is_refused(Communicator& comm) {
  const auto own = comm.allocate(32, Use::reduce);
  try {
    comm.all_reduce(static_cast<float*>(own->data()) + 6, DType::f32, 4, RedOp::sum);
    require(false, "it is refused");
  } catch (const std::invalid_argument&) {
  }
  comm.barrier();
}

// Each would write there when others have gone on.
void a_broadcast_to_several_places_of_one_window_is_refused(Communicator& comm,
                                                            std::int64_t count) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto window =
      comm.allocate(sizeof(float) * static_cast<std::size_t>(count) * size, Use::gather);
  float* own = static_cast<float*>(window->data()) + comm.rank() * count;
  const CommError error = error_of([&] {
    comm.broadcast(own, DType::f32, count, 0);
    comm.barrier();  // a root may have gone on before the others came
  });
  require(
      std::string(error.what()).find(" of communication memory that all ranks share on rank ") !=
          std::string::npos,
      error.what());
  require(std::string(error.fault().kind) == "mismatch", "of that kind");
}

// Memory of one process, which rank 0 lets others open until it leaves the allocation.
class LentMemory final : public shardcomm::WindowProvider {
 public:
  struct Loan {
    std::atomic<bool> is_being_opened{false};
    std::atomic<bool> has_ended{false};
  };
  explicit LentMemory(Loan& loan) : loan_(loan) {}

  std::shared_ptr<void> create(std::size_t, std::uint64_t*) override {
    return {&loan_, [](Loan* loan) { loan->has_ended = true; }};
  }
  std::shared_ptr<shardcomm::Mapping> open(std::uint64_t, std::size_t bytes) override {
    if (!loan_.is_being_opened.exchange(true)) {  // the first of the ranks is slow
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      require(!loan_.has_ended, "rank 0 keeps what another rank opens");
    }
    return shardcomm::Mapping::anonymous(bytes);
  }
  bool shares_addresses() const override { return true; }

 private:
  Loan& loan_;
};

void what_is_opened_outlives_an_allocation_that_fails() {
  LentMemory::Loan loan;
  const auto control = shardcomm::Mapping::anonymous(shardcomm::ControlMemory::bytes(2));
  std::vector<std::shared_ptr<shardcomm::BoardCommunicator>> group;
  for (int rank = 0; rank < 2; ++rank) {
    group.push_back(std::make_shared<shardcomm::BoardCommunicator>(
        "lent", rank, 2, shardcomm::CommOptions{kLongS}, control,
        std::make_unique<LentMemory>(loan), shardcomm::make_host_executor(),
        [](int) { return false; }));
  }
  std::vector<std::thread> threads;
  for (const auto& comm : group) {
    threads.emplace_back([&comm] {
      require_error([&comm] { comm->allocate(4096, Use::gather); }, {"rank 0", "enough"});
    });
  }
  while (!loan.is_being_opened) std::this_thread::yield();
  group[0]->abort("enough");
  for (std::thread& thread : threads) thread.join();
}

void allocations_that_no_address_space_holds_are_refused() {
  const auto group = shardcomm::make_local_group(16);
  for (const std::size_t bytes : {SIZE_MAX, SIZE_MAX / 16, std::size_t{1} << 60}) {
    for (const Use use : {Use::gather, Use::reduce}) {
      try {
        group[0]->allocate(bytes, use);
        require(false, "so much memory is refused");
      } catch (const std::invalid_argument&) {
      }
    }
  }
}

// Memory whose end is noticed: a page that is read after it is a crash.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    require(data_ != MAP_FAILED, "there is memory");
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  float* floats() const { return static_cast<float*>(data_); }

 private:
  std::size_t bytes_;
  void* data_;
};

// Rank 1 is done with its part first, is interrupted while it waits for rank 0, and frees what rank
// 0 still reads.
void operands_outlive_their_readers_after_an_error(Communicator& comm) {
  constexpr std::int64_t kCount = std::int64_t{1} << 24;
  const Pages recv(2 * kCount * sizeof(float));
  // Rank 0's is new memory page by page, and takes several times as long to fill.
  if (comm.rank() == 1) std::fill_n(recv.floats(), 2 * kCount, 0.0f);
  const Pages send(kCount * sizeof(float));
  std::fill_n(send.floats(), kCount, 1.0f);
  comm.barrier();
  try {
    const float* last = recv.floats() + 2 * kCount - 1;
    const shardcomm::WaitCheck interrupt([&comm, last] {
      if (comm.rank() == 1 && *last == 1.0f) throw std::runtime_error("^C");
    });
    comm.all_gather(send.floats(), DType::f32, recv.floats(), DType::f32, kCount);
  } catch (const std::runtime_error&) {
    // Rank 0 may have been done in time.
  }
}

}  // namespace

int main() {
  alarm(120);                                       // a hang is a failure
  on_processes(3, counts_that_differ_are_refused);  // before there are threads
  for (const std::int64_t count : {8, 1000, 300'000}) {
    on_processes(3, [count](Communicator& comm) {
      a_broadcast_to_several_places_of_one_window_is_refused(comm, count);
    });
  }
  on_threads(3, counts_that_differ_are_refused);
  on_threads(3, a_failure_reaches_all);
  for (int i = 0; i < 5; ++i) on_threads(3, an_abort_ends_what_is_under_way);
  a_forked_child_lets_go();
  for (const auto& call : {other_dtype_received, other_root, other_tag}) {
    a_call_that_differs_is_refused(3, call);
  }
  on_threads(2, a_rank_that_fails_alone_ends_the_group);
  on_threads(2, a_rank_that_is_interrupted_says_that_alone);
  on_threads(2, a_call_within_a_wait_is_refused);
  what_was_closed_is_not_used();
  who_calls_after_a_failure_hears_of_that();
  on_threads(2, a_buffer_that_leaves_its_window_is_refused);
  for (const std::int64_t count : {8, 1000, 300'000}) {
    on_threads(3, [count](Communicator& comm) {
      a_broadcast_to_several_places_of_one_window_is_refused(comm, count);
    });
  }
  what_is_opened_outlives_an_allocation_that_fails();
  allocations_that_no_address_space_holds_are_refused();
  for (int i = 0; i < 5; ++i) on_threads(2, operands_outlive_their_readers_after_an_error);
  std::puts("ok");
  return 0;
}
