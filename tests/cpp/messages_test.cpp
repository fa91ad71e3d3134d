// Random programs of messages: any sizes and tags, from given ranks and from any, several threads
// of each rank, requests started, asked, waited for and left to a thread that serves all. What each
// receive must get follows from the program alone. Arguments: SEED, to repeat one.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "ranks.h"

namespace {

using namespace ranks;
using shardcomm::kAnySource;
using shardcomm::Mailbox;
using Ticket = Mailbox::Ticket;
using Random = std::mt19937_64;

std::uint64_t below(Random& random, std::uint64_t most) { return random() % most; }

// A send, and the receive that takes it or, from any, one like it.
struct Transfer {
  int from;
  int to;
  std::int64_t tag;
  std::size_t bytes;
  std::uint64_t number;  // among those of its source, destination and tag
  std::uint64_t seed;
};

struct Program {
  int size;
  int threads;  // of each rank
  std::vector<Transfer> transfers;
};

// Even tags are received from any rank, odd ones from each. Who receives from any does not know
// whose message comes, so that those of one tag must have one size there.
bool is_from_any(std::int64_t tag) { return tag % 2 == 0; }

std::size_t some_size(Random& random) {
  switch (below(random, 8)) {
    case 0:
      return 0;
    case 1:
      return below(random, 5'000'000);
    case 2:
      return below(random, 300'000);
    case 3:
      return 16 * 1024 - 64 + below(random, 128);
    default:
      return below(random, 2000);
  }
}

Program make(std::uint64_t seed) {
  Random random(seed);
  Program program{
      1 + static_cast<int>(below(random, 5)), 1 + static_cast<int>(below(random, 3)), {}};
  const auto size = static_cast<std::uint64_t>(program.size);
  std::map<std::tuple<int, int, std::int64_t>, std::uint64_t> sent;
  std::map<std::pair<int, std::int64_t>, std::size_t> any_size;
  for (std::uint64_t left = 20 + below(random, 150); left > 0; --left) {
    Transfer each{};
    each.from = static_cast<int>(below(random, size));
    each.to = static_cast<int>(below(random, size));
    each.tag = static_cast<std::int64_t>(below(random, 6)) - 2;
    each.bytes = some_size(random);
    if (is_from_any(each.tag)) {
      const std::size_t own = std::max<std::size_t>(each.bytes, sizeof(Transfer));
      each.bytes = any_size.emplace(std::pair(each.to, each.tag), own).first->second;
    }
    each.number = sent[{each.from, each.to, each.tag}]++;
    each.seed = seed * 1000 + left;
    program.transfers.push_back(each);
  }
  return program;
}

// What is sent; from any, it says who has sent it as which.
Bytes contents(const Transfer& each) {
  Bytes made = message(each.seed, each.bytes);
  if (is_from_any(each.tag)) std::memcpy(made.data(), &each, sizeof(each));
  return made;
}

// One end of a transfer, on one rank.
struct End {
  const Transfer* transfer;
  bool sends;
  Bytes bytes;
  Ticket request;
  std::atomic<bool> ended{false};
};

// Sends of a source, a destination and a tag have an order, which one thread keeps; so do receives.
int thread_of(const Program& program, const Transfer& each, bool sends) {
  const std::int64_t key = each.tag * 3 + (sends                   ? each.to * 7 + 1
                                           : is_from_any(each.tag) ? 0
                                                                   : each.from * 5);
  return static_cast<int>((key % program.threads + program.threads) % program.threads);
}

// What one thread of a rank does with its ends.
void run_thread(Mailbox& box, std::vector<End*> ends, Random random) {
  std::vector<End*> started;
  const auto ask = [&](End& end) {
    switch (below(random, 3)) {
      case 0:
        if (box.test(end.request)) end.ended = true;
        break;
      case 1:
        if (box.wait(end.request, static_cast<double>(below(random, 300)) * 1e-6)) end.ended = true;
        break;
      default:
        break;  // whoever serves all is told
    }
  };
  for (End* end : ends) {
    const Transfer& each = *end->transfer;
    if (end->sends) {
      end->bytes = contents(each);
      end->request = box.isend(end->bytes.data(), each.bytes, each.to, each.tag, end);
    } else {
      end->bytes.resize(each.bytes);
      const int source = is_from_any(each.tag) ? kAnySource : each.from;
      end->request = box.irecv(end->bytes.data(), each.bytes, source, each.tag, end);
    }
    if (box.test(end->request)) end->ended = true;
    started.push_back(end);
    if (below(random, 3) == 0) ask(*started[below(random, started.size())]);
  }
  std::shuffle(started.begin(), started.end(), random);
  for (End* end : started) {
    if (below(random, 2) == 0) {
      require(box.wait(end->request), "it ends");
      end->ended = true;
    }
    while (!end->ended) std::this_thread::yield();
  }
}

// The ends of a thread in the order of a program, shuffled where order says nothing.
void shuffle(std::vector<End*>& ends, Random& random) {
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    const std::size_t j = i + below(random, ends.size() - i);
    const auto key = [](const End& end) {
      const Transfer& each = *end.transfer;
      return std::tuple(end.sends,
                        end.sends               ? each.to
                        : is_from_any(each.tag) ? -1
                                                : each.from,
                        each.tag);
    };
    bool free = true;  // nothing of the same kind in between
    for (std::size_t k = i; k <= j && free; ++k) {
      free =
          (k == i || key(*ends[k]) != key(*ends[i])) && (k == j || key(*ends[k]) != key(*ends[j]));
    }
    if (free) std::swap(ends[i], ends[j]);
  }
}

void check_received(int rank, const std::vector<std::unique_ptr<End>>& ends) {
  std::map<std::pair<std::int64_t, int>, std::uint64_t> next;  // from any: by tag and source
  for (const auto& end : ends) {
    if (end->sends) continue;
    Transfer each = *end->transfer;
    if (is_from_any(each.tag)) {
      std::memcpy(&each, end->bytes.data(), sizeof(each));
      require(each.to == rank && each.tag == end->transfer->tag, "a message of this tag");
      require(each.number == next[std::pair(each.tag, each.from)]++, "in the order sent");
    }
    require(end->bytes == contents(each), "what was sent");
  }
}

void run(const Program& program, std::uint64_t seed, Communicator& comm) {
  Mailbox& box = comm.mailbox();
  const int rank = comm.rank();
  std::vector<std::unique_ptr<End>> ends;  // receives of a tag in the order in which they start
  std::vector<std::vector<End*>> of_thread(static_cast<std::size_t>(program.threads));
  for (const Transfer& each : program.transfers) {
    for (const bool sends : {true, false}) {
      if ((sends ? each.from : each.to) != rank) continue;
      ends.push_back(std::make_unique<End>());
      ends.back()->transfer = &each;
      ends.back()->sends = sends;
      of_thread[static_cast<std::size_t>(thread_of(program, each, sends))].push_back(
          ends.back().get());
    }
  }
  std::thread server([&box] {
    while (void* ended = box.wait_any()) static_cast<End*>(ended)->ended = true;
  });
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < of_thread.size(); ++t) {
    Random random(seed * 64 + static_cast<std::uint64_t>(rank) * 8 + t);
    shuffle(of_thread[t], random);
    threads.emplace_back([&box, random, mine = of_thread[t]] { run_thread(box, mine, random); });
  }
  for (std::thread& thread : threads) thread.join();
  box.wake_any();
  server.join();
  check_received(rank, ends);
  for (const auto& end : ends) box.cancel(end->request);
  comm.barrier();
}

// A rank is killed somewhere in the middle. The others end well, if they need nothing more of it,
// or are told of it.
void run_with_a_death(const Program& program, std::uint64_t seed, Communicator& comm) {
  const int victim = static_cast<int>(seed % static_cast<std::uint64_t>(program.size));
  std::thread killer;
  if (comm.rank() == victim) {
    killer = std::thread([seed] {
      const auto end =
          std::chrono::steady_clock::now() + std::chrono::microseconds(seed * 37 % 3000);
      while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
      raise(SIGKILL);
    });
  }
  Mailbox& box = comm.mailbox();
  std::vector<std::unique_ptr<End>> ends;
  for (const Transfer& each : program.transfers) {
    for (const bool sends : {true, false}) {
      if ((sends ? each.from : each.to) != comm.rank()) continue;
      ends.push_back(std::make_unique<End>());
      ends.back()->transfer = &each;
      ends.back()->sends = sends;
    }
  }
  const std::string gone = "rank " + std::to_string(victim);
  try {
    for (const auto& end : ends) {
      const Transfer& each = *end->transfer;
      end->bytes = end->sends ? contents(each) : Bytes(each.bytes);
      end->request = end->sends
                         ? box.isend(end->bytes.data(), each.bytes, each.to, each.tag)
                         : box.irecv(end->bytes.data(), each.bytes,
                                     is_from_any(each.tag) ? kAnySource : each.from, each.tag);
    }
    for (const auto& end : ends) box.wait(end->request);
    check_received(comm.rank(), ends);
    comm.barrier();
  } catch (const CommError& error) {
    if (comm.rank() != victim) require_text(error.what(), {gone, " died"});
  }
  if (killer.joinable()) killer.join();
}

}  // namespace

int main(int argc, char** argv) {
  alarm(290);  // a hang is a failure
  const std::uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const std::uint64_t last = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : argc > 1 ? first : 8;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    const Program program = make(seed);
    on_processes(program.size, [&](Communicator& comm) { run(program, seed, comm); });
    if (program.size > 1) {
      on_processes(program.size,
                   [&](Communicator& comm) { run_with_a_death(program, seed, comm); });
    }
  }
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    const Program program = make(seed);
    on_threads(program.size, [&](Communicator& comm) { run(program, seed, comm); });
  }
  std::puts("ok");
  return 0;
}
