// What is refused of all_to_all, gather, scatter, reduce and operations of bits, and what ranks are
// told that called different ones.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ranks.h"
#include "shardcomm/communicator.h"

namespace {

using namespace ranks;

// Counts of a pair that do not agree, also where the pair is one rank, or where neither is this
// one.
void counts_of_a_pair_agree(Communicator& comm, int from, int to) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  std::vector<std::int64_t> sent(ranks, 2), received(ranks, 2);
  if (comm.rank() == from) sent[static_cast<std::size_t>(to)] = 3;
  if (comm.rank() == to) received[static_cast<std::size_t>(from)] = 5;
  const std::vector<float> send(100);
  std::vector<float> recv(100);
  try {
    comm.all_to_all(send.data(), Parts(sent), recv.data(), Parts(received), DType::f32);
    require(false, "counts that do not agree are refused");
  } catch (const CommError& error) {
    const std::string text = error.what();
    require(std::string(error.fault().kind) == "mismatch", text);
    require(error.fault().operation == "all_to_all" && error.fault().sequence > 0, text);
    const std::vector<std::string> parts{"to all_to_all(f32) #", "rank " + std::to_string(from),
                                         "sends 3 elements to rank " + std::to_string(to),
                                         "which expects 5"};
    for (const std::string& part : parts) {
      require(text.find(part) != std::string::npos, text);
    }
  }
}

// Rank 1 differs in one thing.
void what_differs_is_refused(const std::function<void(Communicator&, bool)>& call,
                             const std::string& part) {
  on_threads(3, [&](Communicator& comm) {
    try {
      call(comm, comm.rank() == 1);
      require(false, "ranks that disagree throw: " + part);
    } catch (const CommError& error) {
      const std::string text = error.what();
      require(text.find("ranks called different collectives") == 0, text);
      require(text.find(part) != std::string::npos, text);
    }
  });
}

void ranks_that_differ_are_told() {
  const Parts parts(2);
  std::array<Bytes, 3> sends{Bytes(64), Bytes(64), Bytes(64)};
  std::array<Bytes, 3> recvs = sends;
  std::array<Bytes, 3> many{Bytes(1000), Bytes(1000), Bytes(1000)};
  const auto send = [&](const Communicator& comm) {
    return sends[static_cast<std::size_t>(comm.rank())].data();
  };
  const auto recv = [&](const Communicator& comm) {
    return recvs[static_cast<std::size_t>(comm.rank())].data();
  };
  using Differs = std::function<void(Communicator&, bool)>;
  const std::vector<std::pair<Differs, const char*>> calls{
      {[&](Communicator& comm, bool differs) {
         comm.gather(send(comm), recv(comm), DType::u8, 8, differs ? 1 : 0);
       },
       "rank 1 called gather(u8, count 8, root 1)"},
      {[&](Communicator& comm, bool differs) {
         const DType dtype = differs ? DType::f32 : DType::i32;
         comm.gather(send(comm), recv(comm), dtype, 2, 0);
       },
       "rank 1 called gather(f32, count 2, root 0)"},
      {[&](Communicator& comm, bool differs) {
         comm.scatter(send(comm), recv(comm), DType::u8, differs ? 7 : 8, 0);
       },
       "rank 1 called scatter(u8, count 7, root 0)"},
      {[&](Communicator& comm, bool differs) {
         const DType dtype = differs ? DType::f64 : DType::i64;
         comm.scatter(send(comm), recv(comm), dtype, 1, 0);
       },
       "rank 1 called scatter(f64, count 1, root 0)"},
      {[&](Communicator& comm, bool differs) {  // more than a root sends without waiting
         const DType dtype = differs ? DType::bf16 : DType::f16;
         comm.broadcast(many[static_cast<std::size_t>(comm.rank())].data(), dtype, 500, 0);
       },
       "rank 1 called broadcast(bf16, count 500, root 0)"},
      {[&](Communicator& comm, bool differs) {
         const RedOp op = differs ? RedOp::bor : RedOp::band;
         comm.reduce(send(comm), recv(comm), DType::u8, 8, op, 2);
       },
       "rank 1 called reduce(u8, count 8, bor, root 2)"},
      {[&](Communicator& comm, bool differs) {
         const DType dtype = differs ? DType::i8 : DType::u8;
         comm.reduce(send(comm), recv(comm), dtype, 8, RedOp::sum, 2);
       },
       "rank 1 called reduce(i8, count 8, sum, root 2)"},
      {[&](Communicator& comm, bool differs) {
         const DType dtype = differs ? DType::i8 : DType::u8;
         comm.all_to_all(send(comm), parts, recv(comm), parts, dtype);
       },
       "rank 1 called all_to_all(i8)"},
      {[&](Communicator& comm, bool differs) {
         comm.all_to_all(send(comm), parts, recv(comm), parts, DType::u8, differs ? 9 : 0);
       },
       "rank 1 called all_to_all(u8, tag 9)"},
      {[&](Communicator& comm, bool differs) {
         if (differs) return comm.all_gather(send(comm), DType::u8, recv(comm), DType::u8, 8);
         comm.gather(send(comm), recv(comm), DType::u8, 8, 1);
       },
       "rank 1 called all_gather(u8, count 8)"},
  };
  for (const auto& [call, part] : calls) what_differs_is_refused(call, part);
}

void refuses(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    require(false, "it is refused: " + part);
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    require(text.find(part) != std::string::npos, text + " has: " + part);
  }
}

// Every rank is refused alike, and they go on together.
void wrong_arguments_are_refused(Communicator& comm) {
  const int size = comm.size();
  const auto shared = comm.allocate(4096, Use::gather);
  const auto own = comm.allocate(4096, Use::reduce);
  std::vector<float> memory(64);
  float* a = memory.data();
  const Parts two(2);
  const auto all_to_all = [&](const void* send, void* recv, const Parts& parts) {
    comm.all_to_all(send, two, recv, parts, DType::f32);
  };
  refuses([&] { all_to_all(a, a + 2, two); }, "all_to_all: send overlaps recv; it must lie apart");
  refuses([&] { all_to_all(a, shared->data(), two); },
          "all_to_all: recv is in communication memory");
  refuses([&] { all_to_all(shared->data(), a, two); },
          "all_to_all: send is in communication memory");
  refuses([&] { all_to_all(a, nullptr, two); }, "all_to_all: recv is null");
  refuses([&] { all_to_all(a, reinterpret_cast<char*>(a) + 33, two); }, "no multiple of 4");
  refuses([&] { all_to_all(a, a + 32, Parts(std::vector<std::int64_t>{1})); },
          "all_to_all: recv_counts: counts must have one entry for each of " +
              std::to_string(size) + " ranks");
  refuses([&] { Parts(std::vector<std::int64_t>{1, -2}, "send_counts"); },
          "send_counts[1] is -2; counts must be at least 0");

  refuses([&] { comm.gather(a, a + 32, DType::f32, 2, size); },
          "gather: root is " + std::to_string(size) + "; it must be a rank, 0 to ");
  refuses([&] { comm.gather(a, a + 32, DType::f32, std::int64_t{1} << 60, 0); },
          "gather: count is 1152921504606846976; for ");
  refuses([&] { comm.gather(nullptr, a, DType::f32, 2, 0); }, "gather: send is null");
  refuses([&] { comm.gather(a, nullptr, DType::f32, 2, comm.rank()); }, "gather: recv is null");
  refuses([&] { comm.gather(a + 1, a, DType::f32, 2, comm.rank()); },
          "gather: send overlaps recv; it must lie apart from it or, in place, be the root's part, "
          "recv[" +
              std::to_string(2 * comm.rank()) + " : ");
  refuses([&] { comm.gather(a, shared->data(), DType::f32, 2, comm.rank()); },
          "gather: recv is in communication memory");
  refuses([&] { comm.scatter(a, a + 32, DType::f32, 2, -1); },
          "scatter: root is -1; it must be a rank");
  refuses([&] { comm.scatter(a, nullptr, DType::f32, 2, 0); }, "scatter: recv is null");
  refuses([&] { comm.scatter(a, shared->data(), DType::f32, 2, 0); },
          "scatter: recv is in communication memory");
  refuses(
      [&] {
        comm.scatter(own->data(), static_cast<float*>(own->data()) + 1, DType::f32, 2, comm.rank());
      },
      "scatter: send overlaps recv");
  refuses([&] { comm.reduce(a, a + 1, DType::f32, 2, RedOp::sum, comm.rank()); },
          "reduce: send overlaps recv; it must lie apart from it or, in place, be the same");
  refuses([&] { comm.reduce(shared->data(), a, DType::f32, 2, RedOp::sum, 0); },
          "reduce: send is in communication memory");
  refuses([&] { comm.reduce(a, shared->data(), DType::f32, 2, RedOp::sum, comm.rank()); },
          "reduce: recv is in communication memory");
  refuses([&] { comm.reduce(a, a + 2, DType::f32, -1, RedOp::sum, 0); }, "reduce: count is -1");
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    for (const RedOp op : {RedOp::band, RedOp::bor, RedOp::bxor}) {
      const std::string text = std::string("op is ") + name(op) +
                               ", an operation of bits, and elements are " + name(dtype) +
                               "; it accepts u8, i8, i32 and i64";
      refuses([&] { comm.reduce(a, a + 8, dtype, 2, op, 0); }, text);
      refuses([&] { comm.all_reduce(a, dtype, 2, op); }, text);
      refuses([&] { comm.reduce_scatter(a, dtype, a + 32, {dtype}, 1, op); }, text);
    }
  }
  float one = 1;
  comm.all_reduce(&one, DType::f32, 1, RedOp::sum);
  require(one == static_cast<float>(size), "ranks that were all refused go on");
}

// A rank alone moves what there is, and compares its counts itself.
void one_rank_alone(Communicator& comm) {
  std::vector<float> a{1, 2, 3}, b(3);
  comm.all_to_all(a.data(), Parts(3), b.data(), Parts(3), DType::f32);
  require(a == b, "to itself");
  comm.gather(a.data() + 1, b.data(), DType::f32, 1, 0);
  require(b[0] == 2, "gathered");
  comm.scatter(a.data() + 2, b.data(), DType::f32, 1, 0);
  require(b[0] == 3, "scattered");
  comm.reduce(a.data(), b.data(), DType::f32, 3, RedOp::avg, 0);
  require(a == b, "reduced");
  refuses([&] { comm.all_to_all(a.data(), Parts(3), b.data(), Parts(2), DType::f32); },
          "send_counts[0] is 3, and recv_counts[0] is 2");
  for (const auto& receipt : comm.receipts()) require(receipt.taken == "alone", receipt.operation);
}

// A child of rank 0 calls while the elements that rank 0 has sent wait for rank 1.
void a_childs_call_leaves_what_its_rank_sends() {
  void* shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(shared != MAP_FAILED, "there is memory");
  auto& step = *new (shared) std::atomic<int>(0);
  const auto reach = [&step](int wanted) {
    while (step < wanted) std::this_thread::yield();
  };
  on_processes(2, [&](Communicator& comm) {
    std::vector<int> send(8, 7), recv(8);
    const auto exchange = [&] {
      comm.all_to_all(send.data(), Parts(4), recv.data(), Parts(4), DType::i32);
    };
    if (comm.rank() == 1) {
      while (comm.pending().at(0).call.empty()) std::this_thread::yield();
      step = 1;
      reach(2);
      exchange();
      require(recv == send, "what rank 0 sent, and not its child");
      return;
    }
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      reach(1);
      send.assign(8, 9);
      int refused = 0;
      try {
        exchange();
      } catch (const CommError&) {
        refused = 1;
      }
      step = 2;
      _exit(refused ? 0 : 1);
    }
    exchange();
    int status = 0;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child is no rank");
  });
  munmap(shared, 4096);
}

}  // namespace

int main() {
  alarm(120);  // a hang is a failure
  on_processes(3, [](Communicator& comm) { counts_of_a_pair_agree(comm, 1, 2); });
  on_processes(2, wrong_arguments_are_refused);
  a_childs_call_leaves_what_its_rank_sends();
  for (const auto& [from, to] : {std::pair{0, 1}, {1, 0}, {2, 2}, {1, 2}}) {
    on_threads(
        4, [from = from, to = to](Communicator& comm) { counts_of_a_pair_agree(comm, from, to); });
  }
  ranks_that_differ_are_told();
  on_threads(3, wrong_arguments_are_refused);
  on_threads(1, one_rank_alone);
  std::puts("ok");
}
