// What the collectives give and where, under the sanitizers: `local` between threads, `shm` between
// forked processes. How they fail: comm_errors_test.cpp.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "ranks.h"
#include "shardcomm/communicator.h"
#include "shardcomm/stream.h"

namespace {

using namespace ranks;

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
    comm.broadcast(send.data(), DType::f32, static_cast<std::int64_t>(send.size()), round % size);
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
    const Parts parts(counts);
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
      comm.broadcast(values, DType::f32, part, alone);
      require(values[0] == alone && values[part - 1] == alone, "of the root");
    }
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

// A rank that copied there would do so after its last meeting, when others may have gone on. So few
// elements that they go beside the call, so few that they go inline, and many.
void a_broadcast_writes_nothing_to_memory_of_all(Communicator& comm) {
  for (const std::int64_t count : {8, 1000, 300'000}) {
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(count);
    const auto window = comm.allocate(bytes, Use::gather);
    auto* values = static_cast<float*>(window->data());
    for (int root = 0; root < comm.size(); ++root) {
      if (comm.rank() == root) std::fill_n(values, count, static_cast<float>(count + root));
      comm.barrier();
      {
        const WriteProtected by_this_rank(values, bytes);
        comm.broadcast(values, DType::f32, count, root);
        const auto value = static_cast<float>(count + root);
        require(values[0] == value && values[count - 1] == value, "the root's value is there");
        comm.barrier();
      }
      comm.barrier();
    }
    // From there to memory of a rank's own.
    if (comm.rank() == 1) std::fill_n(values, count, 7.0f);
    std::vector<float> own(static_cast<std::size_t>(count));
    float* buffer = comm.rank() == 1 ? values : own.data();
    comm.broadcast(buffer, DType::f32, count, 1);
    require(buffer[0] == 7.0f && buffer[count - 1] == 7.0f, "and from there elsewhere");
    comm.barrier();
  }
}

}  // namespace

int main() {
  alarm(120);  // a hang is a failure
  // Before there are threads. Two, so that they spin for each other also on two cores.
  on_processes(2, collectives);
  on_processes(3, collectives);
  on_processes(2, uneven_parts);
  on_processes(3, uneven_parts);
  on_processes(3, windows_are_gathered_in_place);
  on_processes(3, operands_of_several_kinds);
  on_processes(3, a_broadcast_writes_nothing_to_memory_of_all);
  on_processes(2, gathers_and_reduces_at_once);
  on_threads(1, collectives);
  on_threads(2, collectives);
  on_threads(4, collectives);
  on_threads(2, uneven_parts);
  on_threads(4, uneven_parts);
  on_threads(2, windows_are_read_as_soon_as_they_are_gathered);
  on_threads(2, windows_come_and_go_beside_reduces);
  on_threads(3, gathers_and_reduces_at_once);
  on_threads(2, receipts_tell_what_was_taken);
  on_threads(2, windows_are_gathered_in_place);
  on_threads(3, operands_of_several_kinds);
  on_threads(3, a_broadcast_writes_nothing_to_memory_of_all);
  std::puts("ok");
  return 0;
}
