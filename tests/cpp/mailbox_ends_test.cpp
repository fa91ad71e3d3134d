// Messages that never come: ranks that are late, wait for each other, leave, abort or die.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "comm/waited.h"
#include "ranks.h"

namespace {

using namespace ranks;
using shardcomm::kAnySource;
using shardcomm::Mailbox;
using Ticket = Mailbox::Ticket;

constexpr double kShortS = 0.3;
constexpr double kPatientS = 1.0;
constexpr std::size_t kLarge = 60'000'000;
const Bytes large(kLarge);  // made before ranks start: a rank that makes it meanwhile may be late

// Once ranks have met, so that none is late because it has only begun.
Body within(double deadline_s, const Body& body) {
  return [deadline_s, body](Communicator& comm) {
    comm.barrier();
    shardcomm::thread_deadline_s = deadline_s;
    body(comm);
    shardcomm::thread_deadline_s = 0;
  };
}

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

// In no call, until the group has failed.
CommError until_failed(Communicator& comm) {
  return error_of([&] {
    while (true) {
      comm.check();
      std::this_thread::yield();
    }
  });
}

void who_sends_nothing_is_late(Communicator& comm) {
  if (comm.rank() == 1) {
    require_text(until_failed(comm).what(), {"rank 1", " did not come within 0.3 s"});
    return;
  }
  int number = 0;
  const CommError error = error_of([&] { comm.mailbox().recv(&number, sizeof(number), 1, 5); });
  require_text(error.what(), {"rank 1",
                              " did not come within 0.3 s; rank 0 was in recv(4 bytes from rank 1, "
                              "tag 5) #1, the last call of rank 1 was barrier() #"});
  const auto& fault = error.fault();
  require(std::string(fault.kind) == "late" && fault.rank == 1 && fault.reporter == 0, "the kind");
  require(fault.operation == "recv" && fault.sequence == 1, "what this rank was in");
}

void sends_that_face_each_other_are_told(Communicator& comm) {
  const int other = 1 - comm.rank();
  const CommError error =
      error_of([&] { comm.mailbox().send(large.data(), large.size(), other, 2 + comm.rank()); });
  require_text(error.what(), {"rank ", " waited for 0.3 s, and ranks wait for each other: rank 0",
                              " is in send(60000000 bytes to rank 1, tag 2) #1; rank 1",
                              " is in send(60000000 bytes to rank 0, tag 3) #1"});
  require(std::string(error.fault().kind) == "mismatch" && error.fault().rank == -1, "of nobody");
}

// Rank 0 waits for rank 1, which waits for rank 2, which does nothing.
void who_is_waited_for_at_second_hand_is_late(Communicator& comm) {
  if (comm.rank() == 2) return void(until_failed(comm));
  int number = 0;
  const CommError error =
      error_of([&] { comm.mailbox().recv(&number, sizeof(number), comm.rank() + 1, 0); });
  require_text(error.what(), {"rank 2", " did not come within 0.3 s; rank "});
  require(error.fault().rank == 2, "it is the one to blame");
}

// Rank 1 has the longer deadline: it is rank 0 that finds them.
void a_receive_and_a_barrier_that_wait_for_each_other_are_told() {
  const shardcomm::ShmSession session(2);
  for (const int rank : {0, 1}) {
    if (fork() != 0) continue;
    alarm(60);
    const auto comm = shardcomm::make_shm(session.address(), rank, 2, {kLongS});
    comm->barrier();
    if (rank == 0) shardcomm::thread_deadline_s = kShortS;
    int number = 0;
    const CommError error = error_of([&] {
      if (rank == 0) comm->mailbox().recv(&number, sizeof(number), 1, 0);
      comm->barrier();
    });
    require_text(error.what(),
                 {"rank 0", " waited for 0.3 s, and ranks wait for each other: rank 0",
                  " is in recv(4 bytes from rank 1, tag 0) #1; rank 1", " is in barrier() #3"});
    _exit(0);
  }
  for (int i = 0; i < 2; ++i) {
    int status = 0;
    wait(&status);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "both are told");
  }
}

// Its bytes trickle in for longer than the deadline, kPatientS.
void who_goes_on_is_not_late(Communicator& comm) {
  Mailbox& box = comm.mailbox();
  Bytes bytes = message(comm.rank() == 0 ? 1 : 2, kLarge / 10);
  if (comm.rank() == 0) return box.send(bytes.data(), bytes.size(), 1, 0);
  const Ticket receive = box.irecv(bytes.data(), bytes.size(), 0, 0);
  const auto begin = shardcomm::Clock::now();
  for (int part = 1; !box.test(receive); ++part) {
    while (shardcomm::Clock::now() < begin + part * std::chrono::milliseconds(200)) {
      std::this_thread::yield();
    }
  }
  require(shardcomm::Clock::now() - begin > std::chrono::milliseconds(2000), "it took a while");
  require(bytes == message(1, bytes.size()), "and has arrived");
  box.cancel(receive);
}

void what_was_sent_before_the_end_arrives(Communicator& comm, bool dies) {
  Mailbox& box = comm.mailbox();
  std::int64_t number = 17;
  if (comm.rank() == 1) {
    for (int i = 0; i < 3; ++i) box.send(&number, sizeof(number), 0, 1);
    if (dies) raise(SIGKILL);
    comm.close();
    require_error([&] { box.send(&number, sizeof(number), 0, 1); },
                  {"rank 1", " has closed this communicator"});
    return;
  }
  if (dies) until_dead(comm, 1);
  for (const int source : {1, kAnySource, 1}) {
    number = 0;
    require(box.recv(&number, sizeof(number), source, 1) == 1 && number == 17, "it was sent");
  }
  const CommError error = error_of([&] { box.recv(&number, sizeof(number), 1, 1); });
  const std::string how = dies ? " died" : " closed the communicator";
  require_text(error.what(),
               {"rank 1", how + "; rank 0 was in recv(8 bytes from rank 1, tag 1) #4, the last"});
  require(error.fault().rank == 1, "who is gone");
}

void a_death_in_the_middle_ends_the_other_side(Communicator& comm, bool sender_dies, int steps) {
  Mailbox& box = comm.mailbox();
  Bytes bytes(kLarge);
  const bool sends = comm.rank() == 0;
  const Ticket request = sends ? box.isend(bytes.data(), bytes.size(), 1, 3)
                               : box.irecv(bytes.data(), bytes.size(), 0, 3);
  if (sends == sender_dies) {
    for (int step = 0; step < steps; ++step) box.wait(request, 0.001);
    raise(SIGKILL);
  }
  const std::string gone = rank_name(1 - comm.rank());
  const std::string own = rank_name(comm.rank()) + " was in " + (sends ? "send" : "recv");
  require_error([&] { box.wait(request); }, {gone, " died; " + own + "(60000000 bytes"});
  require_error([&] { box.test(request); }, {gone, " died; " + own + "(60000000 bytes"});
  require_error([&] { box.wait_any(); }, {gone, " died"});
  require_error([&] { comm.barrier(); }, {gone, " died"});
  box.cancel(request);
}

// Ranks that do not wait for the dead one go on.
void the_end_of_a_third_harms_no_message(Communicator& comm) {
  if (comm.rank() == 2) raise(SIGKILL);
  if (comm.rank() == 3) return comm.close();
  until_dead(comm, 2);
  Mailbox& box = comm.mailbox();
  int number = 0;
  const int other = 1 - comm.rank();
  const Ticket receive = box.irecv(&number, sizeof(number), other, 0);
  require(!box.wait(receive, 0.2), "it looks around meanwhile");
  box.send(&number, sizeof(number), other, 1);
  box.recv(&number, sizeof(number), other, 1);
  box.send(&number, sizeof(number), other, 0);
  require(box.wait(receive), "they go on");
  box.cancel(receive);
  number = 1;  // neither closes while the other waits
  box.send(&number, sizeof(number), other, 2);
  box.recv(&number, sizeof(number), other, 2);
}

void a_receive_from_any_ends_when_nobody_is_left(Communicator& comm) {
  int number = comm.rank();
  Mailbox& box = comm.mailbox();
  if (comm.rank() == 2) return comm.close();
  if (comm.rank() == 1) {
    box.recv(&number, sizeof(number), 0, 1);
    box.send(&number, sizeof(number), 0, 2);
    return comm.close();
  }
  const Ticket receive = box.irecv(&number, sizeof(number), kAnySource, 2);
  require(!box.wait(receive, 0.2), "rank 1 may still send");
  box.send(&number, sizeof(number), 1, 1);
  require(box.wait(receive), "and does");
  box.cancel(receive);
  require_error([&] { box.recv(&number, sizeof(number), kAnySource, 2); },
                {"rank 1", " closed the communicator; rank 0 was in recv(4 bytes from any rank"});
}

void a_receive_from_any_ends_when_one_has_died(Communicator& comm, bool in_background) {
  if (comm.rank() == 2) raise(SIGKILL);
  int number = 0;
  Mailbox& box = comm.mailbox();
  const Ticket receive = box.irecv(&number, sizeof(number), kAnySource, 2, &number);
  require_error(
      [&] {
        if (in_background) {
          box.wait_any();
        } else {
          box.wait(receive);
        }
      },
      {"rank 2", " died; "});
  box.cancel(receive);
}

// On the rank that ends it, and on another one.
void who_sleeps_is_told_of_an_abort_and_of_a_close(bool aborts) {
  const auto group = shardcomm::make_local_group(3, {kLongS});
  std::vector<std::thread> threads;
  for (const int at : {0, 1}) {
    const std::string wanted = aborts    ? "rank 0 aborted: enough; rank"
                               : at == 0 ? "rank 0 has closed this communicator"
                                         : "rank 0 closed the communicator; rank 1 was in recv";
    threads.emplace_back([&group, at, wanted] {
      int number = 0;
      Mailbox& box = group[static_cast<std::size_t>(at)]->mailbox();
      require_error([&] { box.recv(&number, sizeof(number), 1 - at, 1); }, {wanted});
      require_error([&] { box.isend(&number, sizeof(number), 2, 1); }, {"rank 0 "});
      require_error([&] { box.irecv(&number, sizeof(number), 2, 1); }, {"rank 0 "});
    });
  }
  for (const std::size_t at : {0, 1}) {
    while (group[2]->pending().at(at).call.empty()) std::this_thread::yield();
  }
  if (aborts) {
    group[0]->abort("enough");
  } else {
    group[0]->close();
  }
  for (std::thread& thread : threads) thread.join();
}

// What ended before the failure is told of; then the failure is.
void what_ended_before_a_failure_has_ended() {
  const auto group = shardcomm::make_local_group(2, {kLongS});
  Mailbox& box = group[1]->mailbox();
  int first = 0, second = 0;
  const int number = 5;
  const Ticket ended = box.irecv(&first, sizeof(first), 0, 1, &first);
  const Ticket pending = box.irecv(&second, sizeof(second), 0, 2, &second);
  group[0]->mailbox().isend(&number, sizeof(number), 1, 1);
  require(!box.test(pending), "nobody has sent");
  group[0]->abort("enough");
  require(box.wait_any() == &first && box.test(ended) && box.wait(ended), "it had ended");
  require(first == 5 && box.source(ended) == 0, "with what was sent");
  require_error([&] { box.wait_any(); }, {"rank 0 aborted: enough"});
  require_error([&] { box.test(pending); },
                {"rank 0 aborted: enough; rank 1 was in recv(4 bytes from rank 0, tag 2) #2"});
  require(!box.source(pending), "from nobody");
}

}  // namespace

int main() {
  alarm(280);  // a hang is a failure
  on_both(2, within(kShortS, who_sends_nothing_is_late));
  on_both(2, within(kShortS, sends_that_face_each_other_are_told));
  on_both(3, within(kShortS, who_is_waited_for_at_second_hand_is_late));
  on_both(2, within(kPatientS, who_goes_on_is_not_late));
  for (const bool dies : {false, true}) {
    on_processes(2, [&](Communicator& comm) { what_was_sent_before_the_end_arrives(comm, dies); });
    on_processes(
        3, [&](Communicator& comm) { a_receive_from_any_ends_when_one_has_died(comm, dies); });
  }
  for (const int steps : {0, 1, 2, 5}) {
    for (const bool sender_dies : {false, true}) {
      on_processes(2, [&](Communicator& comm) {
        a_death_in_the_middle_ends_the_other_side(comm, sender_dies, steps);
      });
    }
  }
  on_processes(4, the_end_of_a_third_harms_no_message);
  on_both(3, a_receive_from_any_ends_when_nobody_is_left);
  a_receive_and_a_barrier_that_wait_for_each_other_are_told();
  for (const bool aborts : {true, false}) who_sleeps_is_told_of_an_abort_and_of_a_close(aborts);
  what_ended_before_a_failure_has_ended();
  std::puts("ok");
  return 0;
}
