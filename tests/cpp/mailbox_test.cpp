// Messages, step by step: one thread plays all ranks of a group, since starting and testing never
// wait. So every state of a message is reached, and left, in an order that the test chooses.
#include "comm/mailbox.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shardcomm/communicator.h"
#include "shardcomm/error.h"
#include "stream/wait_check.h"

namespace {

using shardcomm::CommError;
using shardcomm::Communicator;
using shardcomm::kAnySource;
using shardcomm::Mailbox;
using Ticket = Mailbox::Ticket;
using Bytes = std::vector<unsigned char>;

constexpr std::size_t kSmall = 100;         // goes at once
constexpr std::size_t kLarge = 3'000'001;   // many times what is under way at once
constexpr std::size_t kFlood = 256 * 1024;  // more than there is room for between two ranks

void require(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim.c_str());
  std::exit(1);
}

Bytes message(int seed, std::size_t bytes) {
  Bytes made(bytes);
  auto state = static_cast<std::uint32_t>(seed * 2654435761U + 1);
  for (unsigned char& byte : made) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<unsigned char>(state >> 24);
  }
  return made;
}

class Ranks {
 public:
  explicit Ranks(int size, double deadline_s = 20.0)
      : comms_(shardcomm::make_local_group(size, {deadline_s})) {}

  Communicator& comm(int rank) { return *comms_.at(static_cast<std::size_t>(rank)); }
  Mailbox& box(int rank) { return comm(rank).mailbox(); }

  Ticket send(int from, int to, std::int64_t tag, const Bytes& bytes) {
    return box(from).isend(bytes.data(), bytes.size(), to, tag);
  }
  // The same, of bytes that nobody else keeps.
  Ticket send_kept(int from, int to, std::int64_t tag, Bytes bytes) {
    kept_.push_back(std::move(bytes));
    return send(from, to, tag, kept_.back());
  }
  Ticket recv(int at, int from, std::int64_t tag, Bytes& bytes) {
    return box(at).irecv(bytes.data(), bytes.size(), from, tag);
  }
  // Lets all ranks do what they can, until the request has ended or nothing helps.
  bool ends(int rank, Ticket request) {
    for (int round = 0; round < 2000; ++round) {
      if (box(rank).test(request)) return true;
      move();
    }
    return false;
  }
  // As any other function of a mailbox does by the way.
  void move(int rank) { box(rank).wait_any(0.0); }
  void move() {
    for (std::size_t r = 0; r < comms_.size(); ++r) move(static_cast<int>(r));
  }

 private:
  std::vector<std::shared_ptr<Communicator>> comms_;
  std::deque<Bytes> kept_;
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    return error.what();
  }
  require(false, "the call fails");
  return "";
}

void require_error(const std::function<void()>& call, const std::string& wanted) {
  const std::string text = error_of(call);
  require(text.find(wanted) == 0, "\"" + text + "\" begins with \"" + wanted + "\"");
}

// ---- What arrives ----

void every_size_arrives_whether_it_is_expected_or_not() {
  Ranks ranks(2);
  int seed = 0;
  for (const std::size_t around : {0, 32, 64, 16 * 1024, 64 * 1024, 256 * 1024, 1'000'000}) {
    for (std::size_t bytes = around < 40 ? 0 : around - 40; bytes <= around + 40; bytes += 7) {
      for (const bool expected : {false, true}) {
        const Bytes sent = message(++seed, bytes);
        Bytes got(bytes);
        std::vector<Ticket> receive;
        if (expected) receive.push_back(ranks.recv(1, 0, seed, got));
        const Ticket send = ranks.send(0, 1, seed, sent);
        ranks.move();
        if (!expected) receive.push_back(ranks.recv(1, 0, seed, got));
        require(ranks.ends(1, receive[0]) && ranks.ends(0, send), "both end");
        require(got == sent, "what was sent has arrived: " + std::to_string(bytes) + " bytes");
        require(*ranks.box(1).source(receive[0]) == 0, "its source");
        ranks.box(0).cancel(send);
        ranks.box(1).cancel(receive[0]);
      }
    }
  }
}

void messages_of_one_tag_arrive_in_the_order_sent() {
  Ranks ranks(2);
  std::vector<Bytes> sent, got;
  for (int i = 0; i < 20; ++i) sent.push_back(message(i, i % 3 == 0 ? kLarge / 8 : kSmall));
  got.reserve(sent.size());
  std::vector<Ticket> receives;
  const auto expect = [&] {
    got.emplace_back(sent[got.size()].size());
    receives.push_back(ranks.recv(1, 0, 5, got.back()));
  };
  for (int i = 0; i < 7; ++i) expect();
  for (const Bytes& each : sent) ranks.send(0, 1, 5, each);
  for (int i = 7; i < 20; ++i) expect();
  for (std::size_t i = receives.size(); i-- > 0;) require(ranks.ends(1, receives[i]), "it ends");
  require(got == sent, "the first receive has taken the first message, and so on");
}

void tags_are_told_apart() {
  for (const std::size_t bytes : {kSmall, kLarge}) {
    Ranks ranks(2);
    const std::int64_t tags[] = {INT64_MIN, -1, 0, 1, std::int64_t{1} << 40, INT64_MAX};
    std::vector<Bytes> sent, got(6, Bytes(bytes));
    std::vector<Ticket> receives;
    for (std::size_t i = 0; i < 6; ++i) sent.push_back(message(static_cast<int>(i), bytes));
    for (std::size_t i = 0; i < 6; ++i) receives.push_back(ranks.recv(1, 0, tags[i], got[i]));
    for (std::size_t i = 6; i-- > 0;) ranks.send(0, 1, tags[i], sent[i]);
    for (std::size_t i = 0; i < 6; ++i) require(ranks.ends(1, receives[i]), "it ends");
    require(got == sent, "each receive has the message of its tag");
  }
}

void a_receive_from_any_takes_what_came_first() {
  Ranks ranks(4);
  const int order[] = {2, 0, 3, 1};  // with one from itself
  for (const int from : order) {
    ranks.send_kept(from, 1, 9, message(from, kSmall));
    ranks.move(1);
  }
  for (const int from : order) {
    Bytes got(kSmall);
    const Ticket receive = ranks.recv(1, kAnySource, 9, got);
    require(ranks.box(1).test(receive), "it had arrived");
    require(*ranks.box(1).source(receive) == from, "in the order of arrival");
    require(got == message(from, kSmall), "with what that rank has sent");
  }
}

void receives_take_messages_in_the_order_in_which_they_were_started() {
  for (const std::size_t bytes : {kSmall, kLarge}) {
    Ranks ranks(3);
    std::vector<Bytes> got(4, Bytes(bytes)), sent;
    const int sources[] = {kAnySource, 0, kAnySource, 2};
    const int senders[] = {0, 0, 2, 2};
    std::vector<Ticket> receives;
    for (std::size_t i = 0; i < 4; ++i) receives.push_back(ranks.recv(1, sources[i], 0, got[i]));
    require(!ranks.box(1).source(receives[0]), "nobody has sent yet");
    for (int i = 0; i < 4; ++i) sent.push_back(message(i, bytes));
    for (std::size_t i = 0; i < 4; ++i) {
      ranks.send(senders[i], 1, 0, sent[i]);
      for (int round = 0; round < 10; ++round) ranks.move();
    }
    for (std::size_t i = 0; i < 4; ++i) {
      require(ranks.ends(1, receives[i]), "it ends");
      require(*ranks.box(1).source(receives[i]) == senders[i], "its sender");
    }
    require(got == sent, "the first that fits takes it");
  }
}

void a_rank_sends_to_itself() {
  Ranks ranks(2);
  for (const std::size_t bytes : {std::size_t{0}, kSmall, kLarge}) {
    for (const bool sends_first : {true, false}) {
      const Bytes sent = message(1, bytes);
      Bytes got(bytes);
      std::vector<Ticket> send, receive;
      if (sends_first) send.push_back(ranks.send(1, 1, 3, sent));
      receive.push_back(ranks.recv(1, 1, 3, got));
      if (!sends_first) send.push_back(ranks.send(1, 1, 3, sent));
      require(ranks.ends(1, receive[0]) && ranks.ends(1, send[0]), "both end");
      require(got == sent, "what it has sent");
    }
  }
}

void small_sends_end_at_once_and_large_ones_when_they_are_received() {
  Ranks ranks(2);
  const Bytes large = message(1, kLarge), small = message(2, kSmall);
  const Ticket first = ranks.send(0, 1, 1, large);
  const Ticket second = ranks.send(0, 1, 2, small);
  require(ranks.box(0).test(second), "a small one");
  require(!ranks.ends(0, first), "nobody receives the large one");
  Bytes got(kLarge);
  const Ticket receive = ranks.recv(1, 0, 1, got);
  require(ranks.ends(0, first) && ranks.ends(1, receive) && got == large, "now it is received");
}

// Two large messages and small ones share the way.
void a_long_message_holds_up_no_short_one() {
  Ranks ranks(2);
  const Bytes large = message(1, kLarge), small = message(2, kSmall);
  Bytes got_large(kLarge), got_small(kSmall);
  const Ticket receive_large = ranks.recv(1, 0, 1, got_large);
  const Ticket receive_small = ranks.recv(1, 0, 2, got_small);
  ranks.send(0, 1, 1, large);
  for (int round = 0; round < 3; ++round) ranks.move();
  ranks.send(0, 1, 2, small);
  for (int round = 0; round < 3; ++round) ranks.move();
  require(ranks.box(1).test(receive_small) && got_small == small, "the short one is there");
  require(!ranks.box(1).test(receive_large), "and the long one is under way");
  require(ranks.ends(1, receive_large) && got_large == large, "until it is there, too");
}

void nobody_waits_for_room_for_ever() {
  Ranks ranks(2);
  std::vector<Ticket> sends;
  std::vector<Bytes> sent;
  for (int i = 0; i < 3000; ++i) sent.push_back(message(i, 1 + static_cast<std::size_t>(i) % 700));
  for (const Bytes& each : sent) sends.push_back(ranks.send(0, 1, 4, each));
  require(!ranks.box(0).test(sends.back()), "there is no room for all of them");
  for (const Bytes& each : sent) {
    Bytes got(each.size());
    const Ticket receive = ranks.recv(1, 0, 4, got);
    require(ranks.ends(1, receive) && got == each, "each arrives, in order");
    ranks.box(1).cancel(receive);
  }
  require(ranks.box(0).test(sends.back()), "and all were sent");
}

// ---- What is cancelled ----

// Rank 1 can write nothing to rank 0 until that reads.
void block_the_way_back(Ranks& ranks) {
  for (std::size_t bytes = 0; bytes <= kFlood; bytes += 8 * 1024) {
    ranks.send_kept(1, 0, 99, message(0, 8 * 1024));
  }
}

void a_receive_that_is_cancelled_takes_nothing() {
  Ranks ranks(2);
  for (const int source : {0, kAnySource}) {
    Bytes cancelled(kSmall), got(kSmall);
    ranks.box(1).cancel(ranks.recv(1, source, 1, cancelled));
    const Ticket receive = ranks.recv(1, source, 1, got);
    ranks.send_kept(0, 1, 1, message(7, kSmall));
    require(ranks.ends(1, receive) && got == message(7, kSmall), "the next receive has it");
    require(cancelled == Bytes(kSmall), "and not the one that was cancelled");
  }
}

void a_send_that_is_cancelled_before_it_went_never_arrives() {
  Ranks ranks(2);
  std::vector<Ticket> sends;
  for (std::size_t bytes = 0; bytes <= kFlood; bytes += 8 * 1024) {
    sends.push_back(ranks.send_kept(0, 1, 1, message(0, 8 * 1024)));
  }
  const Bytes kept = message(2, kSmall);
  {
    const Bytes gone = message(1, kSmall);
    const Ticket cancelled = ranks.send(0, 1, 2, gone);
    const Ticket next = ranks.send(0, 1, 2, kept);
    require(!ranks.box(0).test(cancelled) && !ranks.box(0).test(next), "there is no room");
    ranks.box(0).cancel(cancelled);
  }
  Bytes got(kSmall);
  const Ticket receive = ranks.recv(1, 0, 2, got);
  require(ranks.ends(1, receive) && got == kept, "the message after it arrives");
}

// A large send is cancelled when its destination has moved `steps` times: it knows of the message,
// has taken it, has some of its bytes. Whatever it has done, it gets the next message instead.
void a_large_send_that_is_cancelled_never_arrives(int steps, bool expected, int source) {
  Ranks ranks(2);
  const Bytes next = message(2, kLarge);
  Bytes got(kLarge);
  std::vector<Ticket> receive;
  if (expected) receive.push_back(ranks.recv(1, source, 2, got));
  {
    const Bytes gone = message(1, kLarge);
    const Ticket cancelled = ranks.send(0, 1, 2, gone);
    for (int step = 0; step < steps; ++step) {
      ranks.move(1);
      if (step + 1 < steps) ranks.move(0);
    }
    require(!ranks.box(0).test(cancelled), "it has not ended");
    ranks.box(0).cancel(cancelled);
  }
  ranks.send(0, 1, 2, next);
  if (!expected) receive.push_back(ranks.recv(1, source, 2, got));
  require(ranks.ends(1, receive[0]) && got == next, "the message after it arrives");
}

void a_send_is_cancelled_while_its_clearance_is_held_up() {
  Ranks ranks(2);
  block_the_way_back(ranks);
  const Bytes next = message(2, kLarge);
  Bytes got(kLarge);
  const Ticket receive = ranks.recv(1, 0, 2, got);
  const Bytes gone = message(1, kLarge);
  const Ticket cancelled = ranks.send(0, 1, 2, gone);
  ranks.move(1);
  ranks.box(0).cancel(cancelled);
  ranks.send(0, 1, 2, next);
  require(ranks.ends(1, receive) && got == next, "the message after it arrives");
}

// A send that was cancelled lets the receive go back among those that wait, to its place.
void a_receive_that_lost_its_message_is_the_first_again() {
  Ranks ranks(2);
  std::vector<Bytes> got(3, Bytes(kLarge)), sent;
  for (int i = 0; i < 3; ++i) sent.push_back(message(i, kLarge));
  std::vector<Ticket> receives;
  for (Bytes& each : got) receives.push_back(ranks.recv(1, 0, 2, each));
  const Ticket cancelled = ranks.send_kept(0, 1, 2, message(9, kLarge));
  ranks.move(1);
  ranks.box(0).cancel(cancelled);
  for (const Bytes& each : sent) ranks.send(0, 1, 2, each);
  for (const Ticket each : receives) require(ranks.ends(1, each), "it ends");
  require(got == sent, "messages are taken in the order of the receives");
}

// What a cancelled receive has taken is dropped; its sender ends, and its buffer stays as it is.
void a_receive_is_cancelled_in_the_middle(int steps) {
  Ranks ranks(2);
  const Bytes sent = message(1, kLarge), next = message(2, kLarge);
  Bytes buffer(kLarge), got(kLarge);
  const Ticket receive = ranks.recv(1, 0, 2, buffer);
  const Ticket send = ranks.send(0, 1, 2, sent);
  for (int step = 0; step < steps; ++step) {
    ranks.move(1);
    ranks.move(0);
  }
  require(!ranks.box(1).test(receive), "it has not ended");
  ranks.box(1).cancel(receive);
  const Bytes before = buffer;
  require(ranks.ends(0, send), "its sender ends");
  require(buffer == before, "nobody writes to the buffer any more");
  ranks.send(0, 1, 2, next);
  const Ticket after = ranks.recv(1, 0, 2, got);
  require(ranks.ends(1, after) && got == next, "later messages arrive");
}

void a_receive_is_cancelled_while_its_clearance_is_held_up(bool sender_gives_up) {
  Ranks ranks(2);
  block_the_way_back(ranks);
  const Bytes sent = message(1, kLarge), next = message(2, kLarge);
  Bytes got(kLarge);
  const Ticket send = ranks.send(0, 1, 2, sent);
  {
    Bytes buffer(kLarge);
    ranks.box(1).cancel(ranks.recv(1, 0, 2, buffer));
  }
  if (sender_gives_up) {
    ranks.box(0).cancel(send);
  } else {
    require(ranks.ends(0, send), "its sender ends");
  }
  ranks.send(0, 1, 2, next);
  const Ticket after = ranks.recv(1, 0, 2, got);
  require(ranks.ends(1, after) && got == next, "later messages arrive");
}

// ---- What is refused ----

void a_message_of_another_size_ends_the_group_on_both_sides() {
  for (const std::size_t bytes : {std::size_t{0}, kSmall, kLarge}) {
    for (const bool expected : {true, false}) {
      Ranks ranks(3);
      Bytes got(kSmall + 1);
      const auto receive = [&] { return ranks.recv(1, 0, 7, got); };
      const auto send = [&] { return ranks.send_kept(0, 1, 7, message(0, bytes)); };
      const std::string wanted = "rank 0 sent " + std::to_string(bytes) +
                                 " bytes with tag 7 to rank 1, which called recv(101 bytes from "
                                 "rank 0, tag 7) #1";
      if (expected) {
        const Ticket waits = receive();
        send();
        require_error([&] { ranks.box(1).test(waits); }, wanted);
        require_error([&] { ranks.box(1).test(waits); }, wanted);
      } else {
        send();
        ranks.move(1);
        require_error([&] { receive(); }, wanted);
      }
      for (const int rank : {0, 2}) require_error([&] { ranks.comm(rank).barrier(); }, wanted);
      require(got == Bytes(kSmall + 1), "nothing was received");
    }
  }
}

void what_is_no_buffer_or_no_rank_is_refused() {
  Ranks ranks(2);
  char byte = 0;
  const auto refused = [&](const std::function<void()>& call, const std::string& wanted) {
    try {
      call();
      require(false, "it is refused: " + wanted);
    } catch (const std::invalid_argument& error) {
      require(error.what() == wanted, error.what());
    }
  };
  Mailbox& box = ranks.box(0);
  refused([&] { box.isend(&byte, 1, 2, 0); }, "send: destination is 2; it must be a rank, 0 to 1");
  refused([&] { box.send(&byte, 1, kAnySource, 0); },
          "send: destination is -1; it must be a rank, 0 to 1");
  refused([&] { box.irecv(&byte, 1, -2, 0); },
          "recv: source is -2; it must be a rank, 0 to 1, or -1 for any");
  refused([&] { box.recv(nullptr, 1, 1, 0); }, "recv: buffer is null, and bytes is 1");
  refused([&] { box.isend(&byte, SIZE_MAX, 1, 0); },
          "send: bytes is " + std::to_string(SIZE_MAX) + "; it must be at most 2^60");
}

}  // namespace

int main() {
  alarm(240);  // a hang is a failure
  every_size_arrives_whether_it_is_expected_or_not();
  messages_of_one_tag_arrive_in_the_order_sent();
  tags_are_told_apart();
  a_receive_from_any_takes_what_came_first();
  receives_take_messages_in_the_order_in_which_they_were_started();
  a_rank_sends_to_itself();
  small_sends_end_at_once_and_large_ones_when_they_are_received();
  a_long_message_holds_up_no_short_one();
  nobody_waits_for_room_for_ever();
  a_receive_that_is_cancelled_takes_nothing();
  a_send_that_is_cancelled_before_it_went_never_arrives();
  for (int steps = 0; steps < 5; ++steps) {
    for (const int source : {0, kAnySource}) {
      a_large_send_that_is_cancelled_never_arrives(steps, false, source);
      a_large_send_that_is_cancelled_never_arrives(steps, true, source);
    }
    a_receive_is_cancelled_in_the_middle(steps);
  }
  a_send_is_cancelled_while_its_clearance_is_held_up();
  a_receive_that_lost_its_message_is_the_first_again();
  a_receive_is_cancelled_while_its_clearance_is_held_up(false);
  a_receive_is_cancelled_while_its_clearance_is_held_up(true);
  a_message_of_another_size_ends_the_group_on_both_sides();
  what_is_no_buffer_or_no_rank_is_refused();
  std::puts("ok");
  return 0;
}
