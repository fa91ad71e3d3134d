// Collectives of several hosts, which are threads here, joined by pairs of sockets. Expected values
// are computed from what each rank is known to send.
//
//   hosts_test [SEED]
#include "shardcomm/hosts.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "copy/element.h"
#include "ranks.h"

namespace {

using namespace shardcomm;
using ranks::error_of;
using ranks::require;

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

// Around what goes with the first message, and around a chunk of some of these shapes.
const std::vector<std::int64_t> kCounts{0, 1, 7, 250, 256, 1000, 65537, 300001};
constexpr std::int64_t kMostRanks = 8;

// Where what rank r has begins in `drawn`.
std::int64_t place(std::uint64_t key, int r) {
  return static_cast<std::int64_t>(mix(key + static_cast<std::uint64_t>(r) * 1'000'003) % 100'000);
}

// Drawn once, and copied from here: a sanitizer looks once at a copy, and else at each element.
// Sums of these are rounded otherwise in another order.
const std::vector<float>& drawn() {
  static const std::vector<float> all = [] {
    std::vector<float> made(static_cast<std::size_t>(kMostRanks * kCounts.back() + 100'000));
    for (std::size_t i = 0; i < made.size(); ++i) {
      const std::uint64_t bits = mix(i);
      const float mantissa = static_cast<float>(bits & 0xffff) / 65536.0f - 0.5f;
      made[i] = std::ldexp(mantissa, static_cast<int>(bits >> 60));
    }
    return made;
  }();
  return all;
}

// What rank r has at i.
float value(std::uint64_t key, int r, std::int64_t i) {
  return drawn()[static_cast<std::size_t>(place(key, r) + i)];
}

float tree(int first, int count, const std::function<float(int)>& at) {
  if (count == 1) return at(first);
  int lower = 1;
  while (2 * lower < count) lower *= 2;
  return tree(first, lower, at) + tree(first + lower, count - lower, at);
}

constexpr int kChannels = 2;

// For each rank of all hosts what make_sockets takes.
std::vector<std::vector<int>> joined(int hosts, int local) {
  const auto place = [&](int channel, int host) {
    return static_cast<std::size_t>(channel * hosts + host);
  };
  std::vector<std::vector<int>> sockets(static_cast<std::size_t>(hosts * local),
                                        std::vector<int>(place(kChannels, 0), -1));
  for (int i = 0; i < local; ++i) {
    for (int host = 0; host < hosts; ++host) {
      for (int other = 0; other < host; ++other) {
        for (int channel = 0; channel < kChannels; ++channel) {
          int pair[2];
          require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "a pair");
          sockets[static_cast<std::size_t>(host * local + i)][place(channel, other)] = pair[0];
          sockets[static_cast<std::size_t>(other * local + i)][place(channel, host)] = pair[1];
        }
      }
    }
  }
  return sockets;
}

using Body = std::function<void(Communicator&)>;

void on_hosts(int hosts, int local, const Body& body, double deadline_s = ranks::kLongS) {
  const auto sockets = joined(hosts, local);
  std::vector<std::thread> threads;
  for (int host = 0; host < hosts; ++host) {
    for (const auto& own : make_local_group(local, {deadline_s})) {
      const auto& leading = sockets[static_cast<std::size_t>(host * local + own->rank())];
      threads.emplace_back([&body, &leading, host, hosts, own] {
        body(*make_hosts(own, make_sockets(leading, host, hosts), host, hosts));
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<float> values(std::uint64_t key, int rank, std::int64_t count) {
  const auto first = drawn().begin() + place(key, rank);
  return {first, first + count};
}

Parts uneven(std::uint64_t key, int size, std::int64_t most) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < size; ++r) {
    const std::uint64_t bits = mix(key * 31 + static_cast<std::uint64_t>(r));
    counts.push_back(bits % 4 == 0 ? 0 : static_cast<std::int64_t>(bits >> 8) % (most + 1));
  }
  return Parts(counts);
}

// Of a sum of 16 values at most, each at most 2^14, when it is added in another order.
constexpr float kRounding = 16 * 16384.0f * 16 * 1.2e-7f;
// Of many elements those are looked at that are so many apart, and so all of a short chunk's.
std::int64_t stride_of(std::int64_t count) { return count < 5000 ? 1 : 61; }

void gathers(Communicator& comm, std::uint64_t key, const Parts& parts) {
  const int size = comm.size();
  const std::int64_t total = parts.total(size);
  const auto window = comm.allocate(sizeof(float) * static_cast<std::size_t>(total), Use::gather);
  std::vector<float> memory(static_cast<std::size_t>(total));
  std::vector<BFloat16> halves(memory.size());
  for (int round = 0; round < 3; ++round) {
    const std::uint64_t now = key + static_cast<std::uint64_t>(round);
    std::vector<float> send = values(now, comm.rank(), parts.count(comm.rank()));
    auto* in_window = static_cast<float*>(window->data());
    comm.all_gather(send.data(), DType::f32, in_window, DType::f32, parts);
    comm.all_gather(send.data(), DType::f32, memory.data(), DType::f32, parts);
    comm.all_gather(send.data(), DType::f32, halves.data(), DType::bf16, parts);
    std::fill(send.begin(), send.end(), -1.0f);
    for (int r = 0; r < size; ++r) {
      for (std::int64_t i = 0; i < parts.count(r); i += stride_of(parts.count(r))) {
        const std::int64_t at = parts.begin(r) + i;
        BFloat16 half{};
        store(half, value(now, r, i));
        require(in_window[at] == value(now, r, i), "a window has what each rank sent");
        require(memory[static_cast<std::size_t>(at)] == value(now, r, i), "so has memory");
        require(halves[static_cast<std::size_t>(at)].bits == half.bits, "and another dtype");
      }
    }
  }
}

// `is_tree`: the ranks of a host are a power of two. If not, sums are rounded otherwise.
void reduces(Communicator& comm, std::uint64_t key, const Parts& parts, bool is_tree) {
  const int size = comm.size();
  const std::vector<float> send = values(key, comm.rank(), parts.total(size));
  std::vector<float> sum(static_cast<std::size_t>(parts.count(comm.rank())));
  std::vector<float> mean(sum.size(), 2.0f), most(sum.size());
  std::vector<BFloat16> halves, half_sum(sum.size());
  for (const float each : send) store(halves.emplace_back(), each);
  comm.reduce_scatter(send.data(), DType::f32, sum.data(), {}, parts, RedOp::sum);
  comm.reduce_scatter(send.data(), DType::f32, mean.data(), {DType::f32, 3.0f, true}, parts,
                      RedOp::avg);
  comm.reduce_scatter(send.data(), DType::f32, most.data(), {}, parts, RedOp::max);
  comm.reduce_scatter(halves.data(), DType::bf16, half_sum.data(), {DType::bf16}, parts,
                      RedOp::sum);
  const auto count = static_cast<std::int64_t>(sum.size());
  for (std::int64_t n = 0; n < count; n += stride_of(count)) {
    const auto i = static_cast<std::size_t>(n);
    const std::int64_t at = parts.begin(comm.rank()) + static_cast<std::int64_t>(i);
    const float want = tree(0, size, [&](int r) { return value(key, r, at); });
    float largest = value(key, 0, at);
    for (int r = 0; r < size; ++r) largest = std::max(largest, value(key, r, at));
    const float error = is_tree ? 0.0f : 3 * kRounding;
    require(std::abs(sum[i] - want) <= error, "a sum of all, in the order of a tree");
    const float factor = 1.0f / static_cast<float>(size);
    require(std::abs(mean[i] - (2.0f + 3.0f * (want * factor))) <= error, "a mean");
    require(most[i] == largest, "the largest");
    if (!is_tree) continue;
    BFloat16 half{};
    store(half, tree(0, size, [&](int r) {
            BFloat16 sent{};
            store(sent, value(key, r, at));
            return load(sent);
          }));
    require(half_sum[i].bits == half.bits, "halves are rounded once");
  }
}

void all_reduces(Communicator& comm, std::uint64_t key, std::int64_t count, bool is_tree) {
  const int size = comm.size();
  std::vector<float> buffer = values(key, comm.rank(), count);
  std::vector<std::int64_t> whole(buffer.size());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    whole[i] = static_cast<std::int64_t>(i) * (comm.rank() - 1);
  }
  comm.all_reduce(buffer.data(), DType::f32, count, RedOp::sum);
  comm.all_reduce(whole.data(), DType::i64, count, RedOp::avg);
  for (std::int64_t at = 0; at < count; at += stride_of(count)) {
    const auto i = static_cast<std::size_t>(at);
    const float want = tree(0, size, [&](int r) { return value(key, r, at); });
    require(std::abs(buffer[i] - want) <= (is_tree ? 0.0f : kRounding), "the sum of all, on all");
    const std::int64_t sum = at * (std::int64_t{size} * (size - 1) / 2 - size);
    require(whole[i] == sum / size, "integers' means are cut");
  }
}

void broadcasts(Communicator& comm, std::uint64_t key, std::int64_t count) {
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<float> buffer = values(key, comm.rank(), count);
    comm.broadcast(buffer.data(), DType::f32, count, root);
    require(buffer == values(key, root, count), "what the root had");
  }
}

// Nobody writes to the root's buffer in its host's window, and the others' windows get it before
// any of their ranks goes on.
void windows_are_broadcast(Communicator& comm, int local, std::int64_t count) {
  const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(count);
  const auto window = comm.allocate(bytes, Use::gather);
  auto* buffer = static_cast<float*>(window->data());
  for (int root = 0; root < comm.size(); ++root) {
    const auto value = static_cast<float>(100 + root);
    if (comm.rank() == root) std::fill_n(buffer, count, value);
    comm.barrier();
    const bool with_root = comm.rank() / local == root / local;
    std::optional<ranks::WriteProtected> here;
    if (with_root) here.emplace(buffer, bytes);
    comm.broadcast(buffer, DType::f32, count, root);
    require(std::count(buffer, buffer + count, value) == count, "a window has what the root had");
    comm.barrier();
    here.reset();
    comm.barrier();
  }
}

// Whether that is what ranks hear which exchange with one that has failed, or with one of its host.
bool has_left(const std::string& text) {
  return text.find("has closed the connection") != std::string::npos ||
         text.find("Broken pipe") != std::string::npos ||
         text.find("Connection reset") != std::string::npos;
}

void places_in_a_window_must_be_one() {
  std::atomic<int> told{0};  // others may hear first that a rank has left
  on_hosts(2, 2, [&](Communicator& comm) {
    const auto window = comm.allocate(sizeof(float) * 8, Use::gather);
    float* own = static_cast<float*>(window->data()) + comm.rank();
    const CommError error = error_of([&] { comm.broadcast(own, DType::f32, 1, 0); });
    const std::string text = error.what();
    const bool is_told = text.find("it must be one place for all") != std::string::npos;
    require(is_told || has_left(text), text);
    told += is_told ? 1 : 0;
  });
  require(told > 0, "why");
}

void everything(int hosts, int local, std::uint64_t key) {
  const bool is_tree = (local & (local - 1)) == 0;
  on_hosts(hosts, local, [&](Communicator& comm) {
    require(comm.transport() == "hosts" && comm.size() == hosts * local, "who it is");
    for (const std::int64_t count : kCounts) {
      gathers(comm, key, Parts(count));
      gathers(comm, key, uneven(key, comm.size(), count));
      reduces(comm, key, Parts(count), is_tree);
      reduces(comm, key, uneven(key, comm.size(), count), is_tree);
      all_reduces(comm, key, count, is_tree);
      broadcasts(comm, key, count);
      comm.barrier();
    }
    std::thread beside([&] { gathers(comm, key, Parts(20000)); });
    for (int i = 0; i < 5; ++i) all_reduces(comm, key, 30000, is_tree);
    beside.join();
  });
}

void different_calls_end_on_all_ranks() {
  for (const int other : {0, 1, 3}) {  // the rank that calls something else
    on_hosts(2, 2, [&](Communicator& comm) {
      std::vector<float> buffer(8);
      const std::string text = error_of([&] {
                                 const std::int64_t count = comm.rank() == other ? 5 : 4;
                                 comm.all_reduce(buffer.data(), DType::f32, count, RedOp::sum);
                                 comm.barrier();
                               }).what();
      const bool is_with = comm.rank() / 2 == other / 2;
      require(is_with ? text.find("all_reduce(f32, count 5, sum)") != std::string::npos
                      : has_left(text),
              text);
      require(error_of([&] { comm.barrier(); }).what() != nullptr, "it stays so");
    });
  }
  on_hosts(2, 2, [&](Communicator& comm) {
    std::vector<float> buffer(20);
    const Parts parts(comm.rank() < 2 ? std::vector<std::int64_t>{1, 2, 3, 4}
                                      : std::vector<std::int64_t>{2, 1, 3, 4});
    const CommError error = error_of(
        [&] { comm.all_gather(buffer.data(), DType::f32, buffer.data() + 10, DType::f32, parts); });
    ranks::require_text(error.what(), {"rank", "gave different counts to all_gather("});
    require(std::string(error.fault().kind) == "mismatch", "of that kind");
  });
}

void ranks_are_called_by_their_numbers_of_all_hosts() {
  on_hosts(2, 2, [&](Communicator& comm) {
    if (comm.rank() == 3) return comm.abort("enough");
    const CommError error = error_of([&] { comm.barrier(); });
    const bool same_host = comm.rank() == 2;
    require(!same_host || std::string(error.what()).find("rank 3 aborted: enough") == 0,
            error.what());
    require(!same_host || error.fault().rank == 3, "the culprit's number");
  });
}

void hosts_that_do_not_come_are_late() {
  std::promise<void> over[2];
  on_hosts(
      2, 2,
      [&](Communicator& comm) {
        if (comm.rank() >= 2) return over[comm.rank() - 2].get_future().wait();
        const CommError error = error_of([&] { comm.barrier(); });
        const std::string text = error.what();  // which may tell that the other rank has said so
        require(text.find("ranks of other hosts did not come within 1 s") != std::string::npos,
                text);
        over[comm.rank()].set_value();
      },
      1.0);
}

void hosts_with_one_number_are_refused() {
  const std::vector<std::shared_ptr<Communicator>> groups[] = {make_local_group(2),
                                                               make_local_group(2)};
  const auto sockets = joined(2, 2);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      const CommError error = error_of([&] {
        std::vector<int> as_of_host_0 = sockets[r];
        if (r / 2 == 1) as_of_host_0 = {-1, sockets[r][0], -1, sockets[r][2]};
        make_hosts(groups[r / 2][r % 2], make_sockets(as_of_host_0, 0, 2), 0, 2);
      });
      require(std::string(error.fault().kind) == "mismatch" || has_left(error.what()),
              error.what());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Rank 0 has gone on before rank 2 comes, whose words it does not wait for any more.
void a_rank_that_closes_ends_the_calls_of_its_counterparts() {
  std::promise<void> closed;
  on_hosts(2, 2, [&](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 0) {
      comm.close();
      return closed.set_value();
    }
    if (comm.rank() == 2) closed.get_future().wait();
    const CommError error = error_of([&] { comm.barrier(); });
    require(error.what() != std::string(), "it hears of it");
    if (comm.rank() == 2) {
      ranks::require_text(error.what(), {"rank 2, in barrier(", "lost the ranks of other hosts",
                                         "rank 0 of host 0: "});
      require(has_left(error.what()), error.what());
    }
  });
}

void what_are_no_sockets_are_refused() {
  int pair[2];
  require(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0, "a pair");
  const auto refused = [&](const std::vector<int>& sockets, int host, int hosts) -> std::string {
    try {
      make_sockets(sockets, host, hosts);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  ranks::require_text(refused({-1, pair[0]}, 0, 2), {"sockets has 2 entries; it must have 4"});
  ranks::require_text(refused({-1, 1 << 20, -1, pair[0]}, 0, 2), {"sockets[1] is 1048576, which"});
  ranks::require_text(refused({-1, pair[0], -1, pair[0]}, 0, 2), {"sockets[1] is", "no connected"});
  int stream[2];
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, stream) == 0, "a pair");
  ranks::require_text(refused({-1, stream[0], -1, stream[0]}, 0, 2),
                      {"sockets[3] is", "as another entry is"});
  require(close(stream[0]) == 0 && close(stream[1]) == 0, "they are still open");
  ranks::require_text(refused({-1, pair[0]}, 0, 1), {"host is 0 of 1; there must be at least 2"});
  require(close(pair[0]) == 0 && close(pair[1]) == 0, "they are still open");
}

void what_is_not_there_says_so() {
  on_hosts(2, 2, [&](Communicator& comm) {
    float own = 0, all[4], other[4];
    const auto refused = [&](const auto& call, const std::string& part) {
      try {
        call();
      } catch (const std::invalid_argument& error) {
        return std::string(error.what()).find(part) != std::string::npos;
      }
      return false;
    };
    const Parts one(1);
    require(refused([&] { comm.all_to_all(all, one, other, one, DType::f32); }, "no all_to_all"),
            "all_to_all");
    require(refused([&] { comm.gather(&own, all, DType::f32, 1, 0); }, "no gather"), "gather");
    require(refused([&] { comm.scatter(all, &own, DType::f32, 1, 0); }, "no scatter"), "scatter");
    require(refused([&] { comm.reduce(&own, all, DType::f32, 1, RedOp::sum, 0); }, "no reduce"),
            "");
    require(refused([&] { comm.mailbox(); }, "no messages"), "messages");
    comm.barrier();
  });
  const auto pair = make_local_group(2);
  for (const int hosts : {1, 0, -1}) {
    try {
      make_hosts(pair[0], nullptr, 0, hosts);
      require(false, "one host is none of several");
    } catch (const std::invalid_argument&) {
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  alarm(280);  // a hang is a failure
  const auto seed =
      argc > 1 ? static_cast<std::uint64_t>(std::atoll(argv[1])) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  everything(2, 2, seed);
  everything(3, 2, seed);
  everything(2, 4, seed);
  everything(2, 3, seed);
  everything(2, 1, seed);
  everything(3, 1, seed);
  for (const std::int64_t count : {1, 1000, 5'000'000}) {
    on_hosts(2, 2, [count](Communicator& comm) { windows_are_broadcast(comm, 2, count); });
  }
  places_in_a_window_must_be_one();
  different_calls_end_on_all_ranks();
  ranks_are_called_by_their_numbers_of_all_hosts();
  hosts_that_do_not_come_are_late();
  hosts_with_one_number_are_refused();
  a_rank_that_closes_ends_the_calls_of_its_counterparts();
  what_are_no_sockets_are_refused();
  what_is_not_there_says_so();
  std::puts("hosts_test: ok");
}
