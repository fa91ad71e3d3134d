// Threads and processes that wait for messages: what wakes them, and timeouts.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"
#include "stream/wait_check.h"

namespace {

using namespace ranks;
using shardcomm::kAnySource;
using shardcomm::Mailbox;
using Ticket = Mailbox::Ticket;

constexpr std::size_t kLarge = 3'000'001;

void messages_go_round(Communicator& comm) {
  Mailbox& box = comm.mailbox();
  const int next = (comm.rank() + 1) % comm.size();
  const int before = (comm.rank() + comm.size() - 1) % comm.size();
  for (const std::size_t count : {std::size_t{1}, std::size_t{200'000}}) {
    std::vector<std::int64_t> numbers(count);
    const std::size_t bytes = count * sizeof(numbers[0]);
    for (int round = 0; round < (count == 1 ? 300 : 4); ++round) {
      if (comm.rank() == 0) {
        numbers.assign(count, round);
        box.send(numbers.data(), bytes, next, 1);
      }
      const int from = round % 2 == 0 ? before : kAnySource;
      require(box.recv(numbers.data(), bytes, from, 1) == before, "from whom");
      require(numbers.front() == round + before && numbers.back() == numbers.front(), "which");
      for (std::int64_t& number : numbers) ++number;
      if (comm.rank() != 0) box.send(numbers.data(), bytes, next, 1);
    }
  }
}

// They wait for different messages, some for the same; each moves all of them.
void several_threads_of_a_rank_wait(Communicator& comm) {
  const int other = 1 - comm.rank();
  std::vector<std::thread> threads;
  for (int t = 0; t < 5; ++t) {
    threads.emplace_back([&comm, other, t] {
      Mailbox& box = comm.mailbox();
      std::vector<int> numbers(t % 2 == 0 ? 1 : 70'000);
      const std::size_t bytes = numbers.size() * sizeof(int);
      for (int round = 0; round < 40; ++round) {
        if (comm.rank() == round % 2) {
          numbers.assign(numbers.size(), round);
          box.send(numbers.data(), bytes, other, t);
          continue;
        }
        const Ticket receive = box.irecv(numbers.data(), bytes, other, t);
        std::thread twin([&] { require(box.wait(receive), "it has ended"); });
        require(box.wait(receive), "it has ended");
        twin.join();
        box.cancel(receive);
        require(numbers.front() == round && numbers.back() == round, "what was sent");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void messages_go_while_collectives_run(Communicator& comm) {
  std::thread collectives([&comm] {
    for (int i = 0; i < 200; ++i) {
      std::int32_t sum = 1;
      comm.all_reduce(&sum, shardcomm::DType::i32, 1, shardcomm::RedOp::sum);
      require(sum == comm.size(), "a sum");
      comm.barrier();
    }
  });
  messages_go_round(comm);
  collectives.join();
}

// A thread serves what another one starts, also while it waits; every third is waited for by
// whoever started it.
void one_thread_serves_all_requests(Communicator& comm) {
  constexpr int kMessages = 300;
  struct Transfer {
    Bytes bytes;
    std::optional<Ticket> request;
    std::atomic<bool> told{false};  // to the server
    bool known = false;             // to whoever started it
  };
  const int other = 1 - comm.rank();
  Mailbox& box = comm.mailbox();
  std::vector<Transfer> transfers(2 * kMessages);
  std::thread server([&] {
    while (void* told = box.wait_any()) {
      auto* ended = static_cast<Transfer*>(told);
      require(ended->request && box.test(*ended->request), "its ticket is known");
      require(!ended->told.exchange(true), "each is told of once");
    }
  });
  const auto size_of = [](int i) { return i % 10 == 0 ? kLarge / 20 : std::size_t{64}; };
  for (int i = 0; i < kMessages; ++i) {
    Transfer& send = transfers[static_cast<std::size_t>(2 * i)];
    Transfer& recv = transfers[static_cast<std::size_t>(2 * i + 1)];
    send.bytes = message(static_cast<std::uint64_t>(2 * i + comm.rank()), size_of(i));
    recv.bytes.resize(size_of(i));
    box.irecv(recv.bytes.data(), recv.bytes.size(), other, i, &recv, &recv.request);
    box.isend(send.bytes.data(), send.bytes.size(), other, i, &send, &send.request);
    for (Transfer* each : {&send, &recv}) {
      if (i % 3 == 0 && each == &recv) box.wait(*each->request);
      each->known = box.test(*each->request);
    }
  }
  for (int i = 0; i < 2 * kMessages; ++i) {
    Transfer& each = transfers[static_cast<std::size_t>(i)];
    while (!each.known && !each.told) std::this_thread::yield();
    if (i % 2 == 0) continue;
    const auto seed = static_cast<std::uint64_t>(i - 1 + other);
    require(each.bytes == message(seed, size_of(i / 2)), "what was sent");
  }
  comm.barrier();
  box.wake_any();
  server.join();
  for (Transfer& each : transfers) box.cancel(*each.request);
}

void who_waits_for_any_is_told_of_all_that_end_later() {
  const auto group = shardcomm::make_local_group(2, {kLongS});
  Mailbox& sender = group[0]->mailbox();
  Mailbox& box = group[1]->mailbox();
  std::vector<int> got(5);
  std::vector<Ticket> receives;
  const int number = 1;
  sender.isend(&number, sizeof(int), 1, 0);
  for (int& each : got) {
    receives.push_back(box.irecv(&each, sizeof(int), 0, &each - got.data(), &each));
  }
  require(box.wait_any(0.0) == nullptr, "the first had ended when it was started");
  for (const std::int64_t tag : {3, 1, 4, 2}) sender.isend(&number, sizeof(int), 1, tag);
  require(box.test(receives[1]), "this one has told of itself");
  box.cancel(receives[4]);
  require(box.wait_any() == &got[3] && box.wait_any(kLongS) == &got[2], "in the order of ends");
  require(box.wait_any(0.0) == nullptr, "and of each once");
  int unknown = 0;
  sender.isend(&number, sizeof(int), 1, 9);
  require(box.recv(&unknown, sizeof(int), 0, 9) == 0, "nobody is to be told of this one");
  require(box.wait_any(0.0) == nullptr, "so nobody is");
  box.wake_any();
  require(box.wait_any() == nullptr, "a call that comes later is woken, too");
  require(!box.wait_any(0.01), "by one wake, one call");
}

void a_wake_and_a_close_reach_who_waits_for_any() {
  const auto group = shardcomm::make_local_group(1, {kLongS});
  Mailbox& box = group[0]->mailbox();
  std::atomic<bool> woken{false};
  std::thread server([&] {
    require(box.wait_any() == nullptr, "woken");
    woken = true;
    require_error([&] { box.wait_any(); }, {"rank 0 has closed this communicator"});
  });
  box.wake_any();
  while (!woken) std::this_thread::yield();
  group[0]->close();
  server.join();
}

void a_timeout_harms_nobody(Communicator& comm) {
  Mailbox& box = comm.mailbox();
  Bytes bytes = message(comm.rank() == 0 ? 1 : 2, kLarge);
  if (comm.rank() == 1) {
    const Ticket receive = box.irecv(bytes.data(), bytes.size(), 0, 1);
    for (const double timeout_s : {0.0, 1e-6, 0.001, 0.1}) {
      require(!box.wait(receive, timeout_s), "nobody has sent");
      require(!box.source(receive), "nor is it known who will");
    }
    comm.barrier();
    require(box.wait(receive, kLongS) && bytes == message(1, kLarge), "it arrives all the same");
    require(box.wait(receive, 0.0) && box.test(receive), "and has ended for good");
    box.cancel(receive);
  } else {
    comm.barrier();
    box.send(bytes.data(), bytes.size(), 1, 1);
  }
}

// As Ctrl-C: the wait ends, and the request goes on; a receive that only waits is cancelled.
void an_interrupted_wait_harms_nobody(Communicator& comm) {
  Mailbox& box = comm.mailbox();
  if (comm.rank() == 0) {
    comm.barrier();
    for (const int number : {1, 2}) box.send(&number, sizeof(number), 1, number);
    return;
  }
  int first = 0, second = 0;
  const Ticket receive = box.irecv(&first, sizeof(first), 0, 1);
  {
    const shardcomm::WaitCheck interrupt([] { throw std::runtime_error("^C"); });
    for (int i = 0; i < 2; ++i) {
      try {
        if (i == 0) box.wait(receive);
        if (i == 1) box.recv(&second, sizeof(second), 0, 2);
        require(false, "the wait is interrupted");
      } catch (const std::runtime_error& error) {
        require(std::string(error.what()) == "^C", error.what());
      }
    }
  }
  require(comm.pending().at(1).call.empty(), "it is in nothing any more");
  comm.barrier();
  int other = 0;
  require(box.recv(&other, sizeof(other), 0, 2) == 0 && other == 2,
          "the one that is not cancelled");
  require(box.wait(receive) && first == 1 && second == 0, "and the one that went on");
  box.cancel(receive);
}

void others_see_who_waits_for_whom() {
  const auto group = shardcomm::make_local_group(3, {kLongS});
  std::vector<std::thread> threads;
  for (const int from : {0, kAnySource}) {
    threads.emplace_back([&group, from] {
      int number = 0;
      group[from == 0 ? 1 : 2]->mailbox().recv(&number, sizeof(number), from, 6);
    });
  }
  const auto waits = [&](int rank) {
    while (true) {
      const shardcomm::Pending entry = group[0]->pending().at(static_cast<std::size_t>(rank));
      if (!entry.call.empty()) return entry;
      std::this_thread::yield();
    }
  };
  const shardcomm::Pending one = waits(1), any = waits(2);
  require(one.rank == 1 && one.channel == "message" && one.sequence == 1, "who is in what");
  require(one.call == "recv(4 bytes from rank 0, tag 6)", one.call);
  require(one.waits_for == std::vector<int>{0} && *one.waiting_s >= 0, "for whom");
  require(any.call == "recv(4 bytes from any rank, tag 6)", any.call);
  require(any.waits_for == std::vector<int>({0, 1}), "from any: for all others");
  const int number = 0;
  for (const int to : {1, 2}) group[0]->mailbox().send(&number, sizeof(number), to, 6);
  for (std::thread& thread : threads) thread.join();
  for (const auto& entry : group[0]->pending()) require(entry.call.empty(), "nobody waits");
}

// A child has a copy of all, and a thread of the parent's may hold the lock.
void a_forked_child_is_refused() {
  const auto group = shardcomm::make_local_group(2, {kLongS});
  Mailbox& box = group[0]->mailbox();
  int number = 0;
  const Ticket receive = box.irecv(&number, sizeof(number), 1, 0);
  std::thread waits([&] { box.wait(receive); });
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const std::vector<std::string> refusal{"this process was forked from rank 0 and is not"};
    require_error([&] { box.isend(&number, sizeof(number), 1, 0); }, refusal);
    require_error([&] { box.irecv(&number, sizeof(number), 1, 0); }, refusal);
    require_error([&] { box.send(&number, sizeof(number), 1, 0); }, refusal);
    require_error([&] { box.recv(&number, sizeof(number), 1, 0); }, refusal);
    require_error([&] { box.test(receive); }, refusal);
    require_error([&] { box.wait(receive); }, refusal);
    require_error([&] { box.source(receive); }, refusal);
    require_error([&] { box.wait_any(); }, refusal);
    require_error([&] { box.wake_any(); }, refusal);
    box.cancel(receive);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child is told");
  const int sent = 4;
  group[1]->mailbox().send(&sent, sizeof(sent), 0, 0);
  waits.join();
  require(number == 4, "and has changed nothing");
}

}  // namespace

int main() {
  alarm(280);                                                           // a hang is a failure
  for (const int size : {2, 4}) on_processes(size, messages_go_round);  // before there are threads
  on_both(2, several_threads_of_a_rank_wait);
  on_both(3, messages_go_while_collectives_run);
  on_both(2, one_thread_serves_all_requests);
  on_both(2, a_timeout_harms_nobody);
  on_both(2, an_interrupted_wait_harms_nobody);
  for (const int size : {2, 4}) on_threads(size, messages_go_round);
  who_waits_for_any_is_told_of_all_that_end_later();
  a_wake_and_a_close_reach_who_waits_for_any();
  others_see_who_waits_for_whom();
  a_forked_child_is_refused();
  std::puts("ok");
  return 0;
}
