// The communicators and streams under the sanitizers: `local` between threads, `shm` between forked
// processes.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"
#include "shardcomm/communicator.h"
#include "shardcomm/stream.h"
#include "stream/wait_check.h"

namespace {

using ranks::on_processes;
using ranks::on_threads;
using ranks::require;
using shardcomm::CommError;
using shardcomm::Communicator;
using shardcomm::DType;
using shardcomm::RedOp;
using shardcomm::Use;

// What every rank sends is known to all, so each checks its own result.
float value(int rank, int i) { return static_cast<float>((rank * 37 + i * 11) % 17 - 8); }

void collectives(Communicator& comm) {
  const int size = comm.size();
  const auto window = comm.allocate(sizeof(float) * 60'000, Use::gather);
  const auto own = comm.allocate(sizeof(float) * 60'000, Use::reduce);
  for (int round = 0; round < 36; ++round) {
    const int part = 1 + (round * 29) % 500 + (round < 18 ? 0 : 12'000);  // few and many
    std::vector<float> send(static_cast<std::size_t>(part * size));
    for (int i = 0; i < part * size; ++i) send[static_cast<std::size_t>(i)] = value(comm.rank(), i);
    std::vector<float> memory(send.size());

    float* gathered = round % 2 ? static_cast<float*>(window->data()) : memory.data();
    comm.all_gather(send.data(), DType::f32, gathered, DType::f32, part);
    for (int r = 0; r < size; ++r) {
      for (int i = 0; i < part; ++i) require(gathered[r * part + i] == value(r, i), "gathered");
    }
    comm.barrier();

    float* source = round % 3 ? static_cast<float*>(own->data()) : send.data();
    if (source != send.data()) std::copy(send.begin(), send.end(), source);
    std::vector<float> reduced(static_cast<std::size_t>(part));
    comm.reduce_scatter(source, DType::f32, reduced.data(), {}, part, RedOp::sum);
    for (int i = 0; i < part; ++i) {
      float total = 0;
      for (int r = 0; r < size; ++r) total += value(r, comm.rank() * part + i);
      require(reduced[static_cast<std::size_t>(i)] == total, "reduced");
    }
    comm.all_reduce(reduced.data(), DType::f32, part, RedOp::max);
    comm.broadcast(send.data(), send.size() * sizeof(float), round % size);
    require(send[0] == value(round % size, 0), "broadcast");
  }
}

// Parts of any lengths, in windows, in memory that ranks reach and through staging; the last round
// takes several chunks of that.
void uneven_parts(Communicator& comm) {
  const int size = comm.size();
  const int rank = comm.rank();
  const std::size_t most = 2'000'000;
  const auto window = comm.allocate(sizeof(float) * most, Use::gather);
  const auto own = comm.allocate(sizeof(float) * most, Use::reduce);
  for (int round = 0; round < 13; ++round) {
    std::vector<std::int64_t> counts;
    for (int r = 0; r < size; ++r) counts.push_back((r * 7 + round * 5) % 23 % (r + 2) * 31);
    if (round == 12) counts[0] = 1'000'001;
    const shardcomm::Parts parts(counts);
    const auto total = static_cast<int>(parts.total(size));
    const int begin = static_cast<int>(parts.begin(rank));
    std::vector<float> all(static_cast<std::size_t>(total));
    for (int i = 0; i < total; ++i) all[static_cast<std::size_t>(i)] = value(rank, i);

    const std::vector<float> send(all.begin() + begin, all.begin() + begin + parts.count(rank));
    std::vector<float> memory(all.size());
    float* gathered = round % 2 ? static_cast<float*>(window->data()) : memory.data();
    comm.all_gather(send.data(), DType::f32, gathered, DType::f32, parts);
    for (int r = 0; r < size; ++r) {
      for (auto i = parts.begin(r); i < parts.begin(r) + parts.count(r); ++i) {
        require(gathered[i] == value(r, static_cast<int>(i)), "gathered uneven parts");
      }
    }
    comm.barrier();

    float* source = round % 3 ? static_cast<float*>(own->data()) : all.data();
    if (source != all.data()) std::copy(all.begin(), all.end(), source);
    std::vector<float> reduced(send.size());
    comm.reduce_scatter(source, DType::f32, reduced.data(), {}, parts, RedOp::sum);
    for (std::size_t i = 0; i < reduced.size(); ++i) {
      float sum = 0;
      for (int r = 0; r < size; ++r) sum += value(r, begin + static_cast<int>(i));
      require(reduced[i] == sum, "reduced uneven parts");
    }
  }
}

// Those of rank 1 have the same sum and are in another order: all are told of both.
void counts_that_differ_are_refused(Communicator& comm) {
  const bool other = comm.rank() == 1;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(comm.size()), 4);
  counts[0] = other ? 7 : 1;
  counts[1] = other ? 1 : 7;
  const std::vector<float> send(7);
  std::vector<float> recv(64);
  try {
    comm.all_gather(send.data(), DType::f32, recv.data(), DType::f32, shardcomm::Parts(counts));
    require(false, "counts that differ are refused");
  } catch (const CommError& error) {
    const std::string text = error.what();
    for (const char* part : {"gave [1, 7, 4]; rank 1", "gave [7, 1, 4]"}) {
      require(text.find(part) != std::string::npos, text);
    }
  }
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

void gathers_and_reduces_at_once(Communicator& comm) {
  constexpr std::int64_t kCount = 5000;
  const auto gathers = shardcomm::make_thread_stream();
  const auto reduces = shardcomm::make_thread_stream();
  const int size = comm.size();
  std::vector<float> shard(kCount, static_cast<float>(comm.rank()));
  std::vector<float> full(kCount * static_cast<std::size_t>(size));
  std::vector<float> sum(kCount, 100.0f);
  for (int i = 0; i < 50; ++i) {
    gathers->enqueue([&](shardcomm::NativeStream) {
      comm.all_gather(shard.data(), DType::f32, full.data(), DType::f32, kCount);
      for (std::int64_t k = 0; k < kCount * size; ++k) {
        require(full[static_cast<std::size_t>(k)] == static_cast<float>(k / kCount),
                "gathered on a stream");
      }
    });
    reduces->enqueue([&](shardcomm::NativeStream) {
      comm.all_reduce(sum.data(), DType::f32, kCount, RedOp::avg);
      for (const float value : sum) require(value == 100.0f, "reduced on a stream");
    });
  }
  gathers->record()->wait();
  reduces->record()->wait();
}

void a_failure_reaches_all(Communicator& comm) {
  try {
    if (comm.rank() == 1) {
      comm.barrier();
    } else {
      std::vector<float> buffer(4);
      comm.broadcast(buffer.data(), 16, 0);
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
  comm.broadcast(buffer.data(), 16, comm.rank() == 1 ? 1 : 0);
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

void receipts_tell_what_was_taken(Communicator& comm) {
  constexpr std::int64_t kMany = 30'000;
  const std::size_t numel = kMany * static_cast<std::size_t>(comm.size());
  const auto window = comm.allocate(sizeof(float) * numel, Use::gather);
  std::vector<float> send(kMany), memory(numel);
  const auto taken = [&](void* recv, std::int64_t count) {
    comm.all_gather(send.data(), DType::f32, recv, DType::f32, count);
    const auto receipt = comm.receipts().at(0);
    require(receipt.operation == "all_gather", "of a gather");
    return receipt.requested + " " + receipt.taken;
  };
  require(taken(window->data(), kMany) == "window window", "many elements, to a window");
  require(taken(window->data(), 4) == "window window", "few elements, to a window");
  require(taken(memory.data(), kMany) == "window direct", "many elements, to ordinary memory");
  require(taken(memory.data(), 4) == "inline inline", "few elements, to ordinary memory");
}

// What lies in its window already needs no second meeting.
void windows_are_gathered_in_place(Communicator& comm) {
  constexpr std::int64_t kPart = 1000;
  const int size = comm.size();
  const auto window = comm.allocate(sizeof(float) * kPart * size, Use::gather);
  auto* full = static_cast<float*>(window->data());
  for (int round = 0; round < 50; ++round) {
    std::fill_n(full + comm.rank() * kPart, kPart, static_cast<float>(round + comm.rank()));
    comm.all_gather(full + comm.rank() * kPart, DType::f32, full, DType::f32, kPart);
    for (int r = 0; r < size; ++r) {
      require(full[r * kPart] == static_cast<float>(round + r) &&
                  full[(r + 1) * kPart - 1] == static_cast<float>(round + r),
              "what rank r has written");
    }
    comm.barrier();
  }
}

// Where one rank's operand is in a window and another's is not, all take one way.
void operands_of_several_kinds(Communicator& comm) {
  for (const std::int64_t part : {3, 20'000}) {
    const int size = comm.size();
    const auto elements = static_cast<std::size_t>(part * size);
    const auto window = comm.allocate(sizeof(float) * elements, Use::gather);
    const auto own = comm.allocate(sizeof(float) * elements, Use::reduce);
    std::vector<float> send(elements), memory(elements), reduced(static_cast<std::size_t>(part));
    for (int alone = 0; alone < size; ++alone) {
      const bool is_alone = comm.rank() == alone;
      float* in_window = static_cast<float*>(window->data());
      float* shard = is_alone ? in_window + alone * part : send.data();
      std::fill_n(shard, part, static_cast<float>(comm.rank()));
      float* recv = is_alone ? in_window : memory.data();
      comm.all_gather(shard, DType::f32, recv, DType::f32, part);
      for (int r = 0; r < size; ++r) {
        require(recv[r * part] == static_cast<float>(r) && recv[(r + 1) * part - 1] == r, "of all");
      }
      float* values = is_alone ? static_cast<float*>(own->data()) : memory.data();
      std::fill_n(values, elements, 1.0f);
      comm.reduce_scatter(values, DType::f32, reduced.data(), {}, part, RedOp::sum);
      require(reduced.front() == size && reduced.back() == size, "summed");
      comm.all_reduce(values, DType::f32, part, RedOp::sum);
      require(values[0] == size && values[part - 1] == size, "summed for all");
      std::fill_n(values, part, static_cast<float>(comm.rank()));
      comm.broadcast(values, sizeof(float) * static_cast<std::size_t>(part), alone);
      require(values[0] == alone && values[part - 1] == alone, "of the root");
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

// Two ranks mostly meet while they spin: what the other wrote before it came must be seen then,
// too.
void windows_are_read_as_soon_as_they_are_gathered(Communicator& comm) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto window = comm.allocate(sizeof(float) * size, Use::gather);
  const auto* gathered = static_cast<const float*>(window->data());
  for (int round = 0; round < 3000; ++round) {
    const float send = static_cast<float>(round + comm.rank());
    comm.all_gather(&send, DType::f32, window->data(), DType::f32, 1);
    for (int r = 0; r < comm.size(); ++r) {
      require(gathered[r] == static_cast<float>(round + r), "what rank r wrote before it came");
    }
  }
}

// The table of windows changes while the other channel looks into it.
void windows_come_and_go_beside_reduces(Communicator& comm) {
  const auto reduces = shardcomm::make_thread_stream();
  const auto own = comm.allocate(sizeof(float) * 64, Use::reduce);
  auto* sum = static_cast<float*>(own->data());
  std::fill_n(sum, 64, 1.0f);
  for (int i = 0; i < 200; ++i) {
    reduces->enqueue(
        [&](shardcomm::NativeStream) { comm.all_reduce(sum, DType::f32, 64, RedOp::avg); });
  }
  for (int i = 0; i < 100; ++i) {
    const auto window = comm.allocate(4096, Use::gather);
    static_cast<float*>(window->data())[comm.rank()] = 1.0f;
  }
  reduces->record()->wait();
  require(sum[63] == 1.0f, "reduced while windows came and went");
}

}  // namespace

int main() {
  alarm(120);  // a hang is a failure
  // Before there are threads. Two, so that they spin for each other also on two cores.
  on_processes(2, collectives);
  on_processes(3, collectives);
  on_processes(2, uneven_parts);
  on_processes(3, uneven_parts);
  on_processes(3, counts_that_differ_are_refused);
  on_processes(3, windows_are_gathered_in_place);
  on_processes(3, operands_of_several_kinds);
  on_processes(2, gathers_and_reduces_at_once);
  on_threads(1, collectives);
  on_threads(2, collectives);
  on_threads(4, collectives);
  on_threads(2, uneven_parts);
  on_threads(4, uneven_parts);
  on_threads(3, counts_that_differ_are_refused);
  on_threads(2, windows_are_read_as_soon_as_they_are_gathered);
  on_threads(2, windows_come_and_go_beside_reduces);
  on_threads(3, gathers_and_reduces_at_once);
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
  on_threads(2, receipts_tell_what_was_taken);
  on_threads(2, windows_are_gathered_in_place);
  on_threads(3, operands_of_several_kinds);
  for (int i = 0; i < 5; ++i) on_threads(2, operands_outlive_their_readers_after_an_error);
  allocations_that_no_address_space_holds_are_refused();
  std::puts("ok");
  return 0;
}
