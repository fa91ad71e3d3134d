// Collectives of ranks of which one lags (lagging.h), while the others overwrite what they sent as
// soon as they have it back.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "copy/element.h"
#include "lagging.h"
#include "shardcomm/communicator.h"

namespace {

using lagging::Rank;
using lagging::require;
using lagging::with_each_rank_lagging;
using shardcomm::BFloat16;
using shardcomm::DType;
using shardcomm::RedOp;
using shardcomm::Use;

// All that was sent is -1.6e6 afterwards: one write, at which a sanitizer looks once.
void overwrite(float* sent, std::int64_t count) {
  if (count == 0) return;  // an empty vector may have no memory
  std::memset(sent, 0xc9, static_cast<std::size_t>(count) * sizeof(float));
}
void overwrite(std::vector<float>& sent) {
  overwrite(sent.data(), static_cast<std::int64_t>(sent.size()));
}

// Four chunks of the staging area, so that both of its halves are used again, and no multiple of
// anything.
constexpr std::int64_t kCount = 400001;

void check_gathered(const Rank& rank, const float* gathered, std::int64_t count) {
  for (int r = 0; r < rank.comm.size(); ++r) {
    for (const std::int64_t i : {std::int64_t{0}, count / 2, count - 1}) {
      require(gathered[r * count + i] == Rank::value(r, i), "gathered what rank r sent");
    }
  }
}

void private_memory_is_gathered(Rank& rank) {
  rank.executor.channel = 0;
  for (int round = 0; round < 3; ++round) {
    std::vector<float> send = rank.values(kCount);
    std::vector<float> recv(send.size() * static_cast<std::size_t>(rank.comm.size()));
    rank.comm.all_gather(send.data(), DType::f32, recv.data(), DType::f32, kCount);
    overwrite(send);
    check_gathered(rank, recv.data(), kCount);
  }
}

void a_window_is_gathered_again_and_again(Rank& rank) {
  rank.executor.channel = 0;
  constexpr std::int64_t kPart = 1000;
  const int size = rank.comm.size();
  const auto window = rank.comm.allocate(sizeof(float) * kPart * size, Use::gather);
  auto* gathered = static_cast<float*>(window->data());
  for (int round = 0; round < 5; ++round) {
    std::vector<float> send(kPart, static_cast<float>(100 * round + rank.comm.rank()));
    rank.comm.all_gather(send.data(), DType::f32, gathered, DType::f32, kPart);
    overwrite(send);
    rank.look_late(0);
    for (int r = 0; r < size; ++r) {
      require(gathered[r * kPart] == static_cast<float>(100 * round + r) &&
                  gathered[(r + 1) * kPart - 1] == static_cast<float>(100 * round + r),
              "a window holds what was gathered until this rank calls the next collective");
    }
  }
}

void sent_buffers_are_reduced(Rank& rank) {
  rank.executor.channel = 1;
  const int size = rank.comm.size();
  for (int round = 0; round < 3; ++round) {
    std::vector<float> send = rank.values(kCount * size);
    std::vector<float> recv(kCount);
    rank.comm.reduce_scatter(send.data(), DType::f32, recv.data(), {}, kCount, RedOp::sum);
    overwrite(send);
    for (const std::int64_t i : {std::int64_t{0}, kCount / 2, kCount - 1}) {
      require(recv[static_cast<std::size_t>(i)] == rank.sum(rank.comm.rank() * kCount + i),
              "reduced what all sent");
    }
  }
}

// In pieces, whose places count in the received dtype.
void other_dtypes_are_received(Rank& rank) {
  constexpr std::int64_t kPart = 400001;
  const auto size = static_cast<std::size_t>(rank.comm.size());
  const auto is = [](BFloat16 received, float value) { return load(received) == value; };
  rank.executor.channel = 0;
  const std::vector<float> shard = rank.values(kPart);
  std::vector<BFloat16> memory(size * kPart);
  const auto window = rank.comm.allocate(size * kPart * sizeof(BFloat16), Use::gather);
  for (BFloat16* gathered : {memory.data(), static_cast<BFloat16*>(window->data())}) {
    rank.comm.all_gather(shard.data(), DType::f32, gathered, DType::bf16, kPart);
    for (int r = 0; r < rank.comm.size(); ++r) {
      for (const std::int64_t i : {std::int64_t{0}, kPart / 2, kPart - 1}) {
        require(is(gathered[r * kPart + i], Rank::value(r, i)), "gathered in another dtype");
      }
    }
  }
  rank.comm.barrier();
  rank.executor.channel = 1;
  const std::vector<float> full = rank.values(kPart * rank.comm.size());
  std::vector<BFloat16> reduced(kPart);
  rank.comm.reduce_scatter(full.data(), DType::f32, reduced.data(), {DType::bf16}, kPart,
                           RedOp::sum);
  for (const std::int64_t i : {std::int64_t{0}, kPart / 2, kPart - 1}) {
    require(is(reduced[static_cast<std::size_t>(i)], rank.sum(rank.comm.rank() * kPart + i)),
            "reduced into another dtype");
  }
}

void sent_windows_are_reduced(Rank& rank) {
  rank.executor.channel = rank.executor.allocates_on = 1;
  const int size = rank.comm.size();
  constexpr std::int64_t kPart = 5000;
  const auto window = rank.comm.allocate(sizeof(float) * kPart * size, Use::reduce);
  auto* send = static_cast<float*>(window->data());
  for (int round = 0; round < 3; ++round) {
    const std::vector<float> mine = rank.values(kPart * size);
    std::copy(mine.begin(), mine.end(), send);
    std::vector<float> recv(kPart);
    rank.comm.reduce_scatter(send, DType::f32, recv.data(), {}, kPart, RedOp::sum);
    overwrite(send, kPart * size);
    for (std::int64_t i = 0; i < kPart; ++i) {
      require(recv[static_cast<std::size_t>(i)] == rank.sum(rank.comm.rank() * kPart + i),
              "reduced what all sent in windows");
    }
  }
}

void buffers_are_all_reduced(Rank& rank) {
  rank.executor.channel = 1;
  for (int round = 0; round < 3; ++round) {
    std::vector<float> buffer = rank.values(kCount);
    rank.comm.all_reduce(buffer.data(), DType::f32, kCount, RedOp::sum);
    const std::vector<float> result = buffer;
    overwrite(buffer);
    for (std::int64_t i = 0; i < kCount; i += 997) {
      require(result[static_cast<std::size_t>(i)] == rank.sum(i), "all-reduced what all had");
    }
    require(result.back() == rank.sum(kCount - 1), "all-reduced to the end");
  }
}

void buffers_are_broadcast(Rank& rank) {
  rank.executor.channel = 0;
  for (int root = 0; root < rank.comm.size(); ++root) {
    std::vector<float> buffer = rank.values(kCount);
    rank.comm.broadcast(buffer.data(), DType::f32, kCount, root);
    const std::vector<float> result = buffer;
    overwrite(buffer);
    for (std::int64_t i = 0; i < kCount; i += 997) {
      require(result[static_cast<std::size_t>(i)] == Rank::value(root, i), "what the root had");
    }
    require(result.back() == Rank::value(root, kCount - 1), "what the root had, to the end");
  }
}

// The parts of one rank end in the middle of another's, and of three ranks one has nothing. Counts
// go through the staging area, too.
shardcomm::Parts uneven(int size) {
  std::vector<std::int64_t> counts{1000, kCount};
  if (size > 2) counts.push_back(0);
  return shardcomm::Parts(counts);
}

void uneven_parts_are_gathered(Rank& rank) {
  rank.executor.channel = 0;
  const int size = rank.comm.size();
  const shardcomm::Parts parts = uneven(size);
  const auto total = static_cast<std::size_t>(parts.total(size));
  const auto window = rank.comm.allocate(sizeof(float) * total, Use::gather);
  std::vector<float> memory(total);
  for (int round = 0; round < 4; ++round) {
    auto* recv = round % 2 ? static_cast<float*>(window->data()) : memory.data();
    std::vector<float> send = rank.values(parts.count(rank.comm.rank()));
    rank.comm.all_gather(send.data(), DType::f32, recv, DType::f32, parts);
    overwrite(send);
    rank.look_late(0);
    for (int r = 0; r < size; ++r) {
      for (std::int64_t i = 0; i < parts.count(r); i += 997) {
        require(recv[parts.begin(r) + i] == Rank::value(r, i), "gathered the part of rank r");
      }
    }
  }
}

void uneven_parts_are_reduced(Rank& rank) {
  rank.executor.channel = rank.executor.allocates_on = 1;
  const int size = rank.comm.size();
  const shardcomm::Parts parts = uneven(size);
  const std::int64_t total = parts.total(size);
  const auto window =
      rank.comm.allocate(sizeof(float) * static_cast<std::size_t>(total), Use::reduce);
  for (int round = 0; round < 4; ++round) {
    std::vector<float> send = rank.values(total);
    float* from = round % 2 ? static_cast<float*>(window->data()) : send.data();
    if (from != send.data()) std::copy(send.begin(), send.end(), from);
    std::vector<float> recv(static_cast<std::size_t>(parts.count(rank.comm.rank())));
    rank.comm.reduce_scatter(from, DType::f32, recv.data(), {}, parts, RedOp::sum);
    overwrite(from, total);
    for (std::size_t i = 0; i < recv.size(); i += 997) {
      const std::int64_t place = parts.begin(rank.comm.rank()) + static_cast<std::int64_t>(i);
      require(recv[i] == rank.sum(place), "reduced its part of what all sent");
    }
  }
}

// Rank r sends (r * 5 + to * 3) % 4 chunks' elements to rank `to`, so to some nothing.
void all_is_exchanged(Rank& rank) {
  rank.executor.channel = 0;
  rank.executor.allocates_on = 1;
  const int size = rank.comm.size();
  const auto count = [](int from, int to) {
    return std::int64_t{100003} * ((from * 5 + to * 3) % 4);
  };
  std::vector<std::int64_t> sent, received;
  for (int r = 0; r < size; ++r) {
    sent.push_back(count(rank.comm.rank(), r));
    received.push_back(count(r, rank.comm.rank()));
  }
  const shardcomm::Parts send_parts(sent);
  const shardcomm::Parts recv_parts(received);
  const auto total = static_cast<std::size_t>(4 * 100003 * size);  // alike on all ranks
  const auto window = rank.comm.allocate(sizeof(float) * total, Use::reduce);
  for (int round = 0; round < 4; ++round) {
    std::vector<float> memory = rank.values(send_parts.total(size));
    float* send = round % 2 ? static_cast<float*>(window->data()) : memory.data();
    if (send != memory.data()) std::copy(memory.begin(), memory.end(), send);
    std::vector<float> recv(static_cast<std::size_t>(recv_parts.total(size)));
    rank.comm.all_to_all(send, send_parts, recv.data(), recv_parts, DType::f32);
    overwrite(send, send_parts.total(size));
    for (int from = 0; from < size; ++from) {
      std::int64_t begin = 0;  // of this rank's part in what rank `from` sends
      for (int to = 0; to < rank.comm.rank(); ++to) begin += count(from, to);
      for (std::int64_t i = 0; i < recv_parts.count(from); i += 997) {
        require(recv[static_cast<std::size_t>(recv_parts.begin(from) + i)] ==
                    Rank::value(from, begin + i),
                "received what rank r sent here");
      }
    }
  }
}

void a_root_gathers_and_scatters(Rank& rank) {
  rank.executor.channel = 0;
  rank.executor.allocates_on = 1;
  const int size = rank.comm.size();
  constexpr std::size_t kBytes = sizeof(float) * kCount;
  const auto window = rank.comm.allocate(kBytes * static_cast<std::size_t>(size), Use::reduce);
  for (int root = 0; root < size; ++root) {
    const bool is_root = rank.comm.rank() == root;
    const std::vector<float> values = rank.values(kCount * size);
    std::vector<float> memory = values;
    float* send = root % 2 ? static_cast<float*>(window->data()) : memory.data();
    std::copy(values.begin(), values.end(), send);
    std::vector<float> gathered(is_root ? values.size() : 0);
    rank.comm.gather(send, gathered.data(), DType::f32, kCount, root);
    overwrite(send, kCount);
    if (is_root) check_gathered(rank, gathered.data(), kCount);

    std::copy(values.begin(), values.end(), send);
    std::vector<float> recv(kCount);
    rank.comm.scatter(send, recv.data(), DType::f32, kCount, root);
    overwrite(send, kCount * size);
    for (std::int64_t i = 0; i < kCount; i += 997) {
      require(recv[static_cast<std::size_t>(i)] == Rank::value(root, rank.comm.rank() * kCount + i),
              "received its part of what the root had");
    }
  }
}

void a_root_reduces(Rank& rank) {
  rank.executor.channel = rank.executor.allocates_on = 1;
  const auto window = rank.comm.allocate(sizeof(float) * kCount, Use::reduce);
  for (int root = 0; root < rank.comm.size(); ++root) {
    std::vector<float> memory = rank.values(kCount);
    float* send = root % 2 ? static_cast<float*>(window->data()) : memory.data();
    if (send != memory.data()) std::copy(memory.begin(), memory.end(), send);
    std::vector<float> recv(rank.comm.rank() == root ? kCount : 0);
    rank.comm.reduce(send, recv.data(), DType::f32, kCount, RedOp::sum, root);
    overwrite(send, kCount);
    for (std::size_t i = 0; i < recv.size(); i += 997) {
      require(recv[i] == rank.sum(static_cast<std::int64_t>(i)), "reduced what all sent");
    }
  }
}

// So few that they lie beside the calls of their ranks, where every second call lies.
constexpr std::int64_t kFew = 3;

float few(int rank, int round, std::int64_t i) {
  return Rank::value(rank, i) + static_cast<float>(100 * round);
}

std::vector<float> few_of(const Rank& rank, int round, std::int64_t count) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(few(rank.comm.rank(), round, i));
  return values;
}

void few_elements_are_gathered(Rank& rank) {
  rank.executor.channel = 0;
  const int size = rank.comm.size();
  for (int round = 0; round < 4; ++round) {
    const std::vector<float> send = few_of(rank, round, kFew);
    std::vector<float> recv(kFew * static_cast<std::size_t>(size));
    rank.comm.all_gather(send.data(), DType::f32, recv.data(), DType::f32, kFew);
    for (std::int64_t i = 0; i < kFew * size; ++i) {
      require(recv[static_cast<std::size_t>(i)] == few(static_cast<int>(i / kFew), round, i % kFew),
              "gathered the few elements of all");
    }
    const int root = round % size;
    const std::vector<float> parts = few_of(rank, round, kFew * size);
    std::vector<float> part(kFew);
    rank.comm.scatter(parts.data(), part.data(), DType::f32, kFew, root);
    for (std::int64_t i = 0; i < kFew; ++i) {
      require(part[static_cast<std::size_t>(i)] == few(root, round, rank.comm.rank() * kFew + i),
              "received its few elements of the root's");
    }
  }
}

void few_elements_are_reduced(Rank& rank) {
  rank.executor.channel = 1;
  const int size = rank.comm.size();
  const auto sum = [size](int round, std::int64_t i) {
    float total = 0;
    for (int r = 0; r < size; ++r) total += few(r, round, i);
    return total;
  };
  for (int round = 0; round < 4; ++round) {
    std::vector<float> buffer = few_of(rank, round, kFew);
    rank.comm.all_reduce(buffer.data(), DType::f32, kFew, RedOp::sum);
    const std::vector<float> send = few_of(rank, round, kFew * size);
    std::vector<float> recv(kFew);
    rank.comm.reduce_scatter(send.data(), DType::f32, recv.data(), {}, kFew, RedOp::sum);
    for (std::int64_t i = 0; i < kFew; ++i) {
      const auto at = static_cast<std::size_t>(i);
      require(buffer[at] == sum(round, i), "all-reduced the few elements of all");
      require(recv[at] == sum(round, rank.comm.rank() * kFew + i), "reduced its few elements");
    }
  }
}

// Rank 0's place is a window of all; another rank's is another window, or none.
void places_differ_from_rank_to_rank(Rank& rank) {
  rank.executor.channel = 0;
  constexpr std::int64_t kPart = 100;
  const int size = rank.comm.size();
  const std::size_t bytes = sizeof(float) * kPart * static_cast<std::size_t>(size);
  const auto first = rank.comm.allocate(bytes, Use::gather);
  const auto second = rank.comm.allocate(bytes, Use::gather);
  rank.executor.allocates_on = 1;
  const auto of_reduces = rank.comm.allocate(bytes, Use::reduce);  // one region for each rank
  std::vector<float> own(kPart * static_cast<std::size_t>(size));
  const std::vector<float> send = rank.values(kPart);
  for (void* elsewhere : {second->data(), static_cast<void*>(own.data())}) {
    void* recv = rank.comm.rank() == 0 ? first->data() : elsewhere;
    if (rank.comm.rank() > 1) recv = own.data();  // two ranks would write into one window
    rank.comm.all_gather(send.data(), DType::f32, recv, DType::f32, kPart);
    check_gathered(rank, static_cast<float*>(recv), kPart);
    rank.comm.barrier();
    overwrite(static_cast<float*>(recv), kPart * size);
    rank.comm.barrier();
  }
  auto* recv = static_cast<float*>(of_reduces->data());
  rank.comm.all_gather(send.data(), DType::f32, recv, DType::f32, kPart);
  check_gathered(rank, recv, kPart);
}

}  // namespace

int main() {
  alarm(280);  // a hang is a failure
  for (const int size : {2, 3}) {
    for (const bool shares_addresses : {true, false}) {
      for (const auto& body :
           {private_memory_is_gathered, a_window_is_gathered_again_and_again,
            sent_buffers_are_reduced, sent_windows_are_reduced, buffers_are_all_reduced,
            buffers_are_broadcast, other_dtypes_are_received, places_differ_from_rank_to_rank,
            uneven_parts_are_gathered, uneven_parts_are_reduced, all_is_exchanged,
            a_root_gathers_and_scatters, a_root_reduces, few_elements_are_gathered,
            few_elements_are_reduced}) {
        with_each_rank_lagging(size, shares_addresses, body);
      }
    }
  }
  std::puts("ok");
  return 0;
}
