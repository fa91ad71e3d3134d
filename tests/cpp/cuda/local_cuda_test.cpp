// The `local` transport on a device under the sanitizers, without a GPU: streams that are threads,
// so that work which is not ordered by events is a race that the thread sanitizer sees.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"
#include "shardcomm/communicator.h"
#include "shardcomm/error.h"
#include "shardcomm/stream.h"

namespace {

using namespace shardcomm;
using Comm = std::shared_ptr<Communicator>;

constexpr int kRanks = 4;
constexpr int kRounds = 300;
constexpr std::int64_t kMost = 2000;  // elements of a rank's part

void require(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim.c_str());
  std::_Exit(1);
}

float value(int round, int rank, std::int64_t i) {
  return static_cast<float>((round * 7 + rank * 3 + i) % 17 - 8);
}

void fill(const std::unique_ptr<Stream>& stream, float* data, int round, int rank,
          std::int64_t count) {
  fake_enqueue(static_cast<cudaStream_t>(stream->native()), [=] {
    for (std::int64_t i = 0; i < count; ++i) data[i] = value(round, rank, i);
  });
}

template <class Expected>
void check(const std::unique_ptr<Stream>& stream, const float* data, std::int64_t count,
           const char* what, Expected expected) {
  fake_enqueue(static_cast<cudaStream_t>(stream->native()), [=] {
    for (std::int64_t i = 0; i < count; ++i) require(data[i] == expected(i), what);
  });
}

// As an engine does it: what computes is one stream, gathers and reduces two others, and only
// events order them. No host waits but where ranks meet.
void rank_main(const Comm& comm, std::uint32_t seed) {
  cudaSetDevice(0);
  std::mt19937 choose(seed);  // the same on every rank
  const int rank = comm->rank();
  const auto compute = make_cuda_stream(0);
  const auto gathers = make_cuda_stream(0);
  const auto reduces = make_cuda_stream(0);
  const auto bytes = static_cast<std::size_t>(kRanks * kMost) * sizeof(float);
  const auto window = comm->allocate(bytes, Use::gather);
  const auto own = comm->allocate(bytes, Use::reduce);
  require(window->device() == 0 && own->device() == 0, "memory is on the device");
  std::vector<float> part(kMost);
  std::vector<float> whole(kRanks * kMost);
  std::vector<float> result(kMost);
  std::vector<float> exchanged(kRanks * kMost);
  std::vector<float> home(kMost);  // the host's own, which no stream touches but by copies
  std::shared_ptr<Event> fetched;
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t n = choose() % kMost + 1;
    const bool in_window = choose() % 2 == 0;
    auto* full = in_window ? static_cast<float*>(window->data()) : whole.data();
    const bool offloaded = choose() % 2 == 0;
    if (offloaded) {
      if (fetched) fetched->wait();
      for (std::int64_t i = 0; i < n; ++i) home[i] = value(round, rank, i);
      gathers->copy(part.data(), home.data(), static_cast<std::size_t>(n) * sizeof(float));
      fetched = gathers->record();
    } else {
      fill(compute, part.data(), round, rank, n);
    }
    gathers->wait(compute->record());
    comm->all_gather(part.data(), DType::f32, full, DType::f32, n, 0, gathers->native());
    compute->wait(gathers->record());
    check(compute, full, kRanks * n, "gathered",
          [=](std::int64_t i) { return value(round, static_cast<int>(i / n), i % n); });

    const bool in_memory = choose() % 2 == 0;
    auto* grads = in_memory ? static_cast<float*>(own->data()) : whole.data();
    compute->wait(reduces->record());  // the last reduce has read them
    fill(compute, grads, round, rank, kRanks * n);
    reduces->wait(compute->record());
    comm->reduce_scatter(grads, DType::f32, result.data(), {}, n, RedOp::sum, 0, reduces->native());
    compute->wait(reduces->record());
    check(compute, result.data(), n, "reduced", [=](std::int64_t i) {
      float sum = 0;
      for (int r = 0; r < kRanks; ++r) sum += value(round, r, rank * n + i);
      return sum;
    });
    if (offloaded) {
      std::vector<float> landed(static_cast<std::size_t>(n));
      reduces->copy(landed.data(), result.data(), landed.size() * sizeof(float));
      reduces->record()->wait();
      for (int r = 0; r < kRanks; ++r)
        for (std::int64_t i = 0; i < n; ++i) landed[i] -= value(round, r, rank * n + i);
      require(landed == std::vector<float>(landed.size(), 0), "copied to the host");
      compute->wait(reduces->record());  // the result has been read
    }

    if (choose() % 4 == 0) {
      fill(compute, result.data(), round, rank, n);
      reduces->wait(compute->record());
      comm->all_reduce(result.data(), DType::f32, n, RedOp::max, 0, reduces->native());
      compute->wait(reduces->record());
      check(compute, result.data(), n, "all-reduced", [=](std::int64_t i) {
        float most = value(round, 0, i);
        for (int r = 1; r < kRanks; ++r) most = std::max(most, value(round, r, i));
        return most;
      });
    }
    if (choose() % 4 == 0) {
      const int root = static_cast<int>(choose() % kRanks);
      fill(compute, result.data(), round, rank, n);
      gathers->wait(compute->record());
      comm->broadcast(result.data(), DType::f32, n, root, gathers->native());
      compute->wait(gathers->record());
      check(compute, result.data(), n, "broadcast",
            [=](std::int64_t i) { return value(round, root, i); });
    }
    if (choose() % 4 == 0) {  // rank r sends nothing to rank r + 1
      const auto part_of = [n](int from, int to) { return (from + 1) % kRanks == to ? 0 : n; };
      std::vector<std::int64_t> sent, received;
      for (int r = 0; r < kRanks; ++r) sent.push_back(part_of(rank, r));
      for (int r = 0; r < kRanks; ++r) received.push_back(part_of(r, rank));
      fill(compute, grads, round, rank, kRanks * n);
      gathers->wait(compute->record());
      comm->all_to_all(grads, Parts(sent), exchanged.data(), Parts(received), DType::f32, 0,
                       gathers->native());
      compute->wait(gathers->record());
      check(compute, exchanged.data(), (kRanks - 1) * n, "exchanged", [=](std::int64_t i) {
        const int left_out = (rank + kRanks - 1) % kRanks;
        const int from = static_cast<int>(i / n) + (i / n >= left_out ? 1 : 0);
        const std::int64_t parts_before = rank > (from + 1) % kRanks ? rank - 1 : rank;
        return value(round, from, parts_before * n + i % n);
      });
    }
    if (choose() % 4 == 0) {
      const int root = static_cast<int>(choose() % kRanks);
      fill(compute, result.data(), round, rank, n);
      gathers->wait(compute->record());
      comm->gather(result.data(), exchanged.data(), DType::f32, n, root, 0, gathers->native());
      comm->scatter(exchanged.data(), part.data(), DType::f32, n, root, 0, gathers->native());
      reduces->wait(gathers->record());
      comm->reduce(part.data(), exchanged.data(), DType::f32, n, RedOp::sum, root, 0,
                   reduces->native());
      compute->wait(reduces->record());
      check(compute, part.data(), n, "gathered and scattered",
            [=](std::int64_t i) { return value(round, rank, i); });
      gathers->wait(compute->record());  // before the next round writes the part
      if (rank == root) {
        check(compute, exchanged.data(), n, "reduced to the root", [=](std::int64_t i) {
          float sum = 0;
          for (int r = 0; r < kRanks; ++r) sum += value(round, r, i);
          return sum;
        });
      }
    }
  }
  compute->record()->wait();
}

// Before it has posted anything: the group goes on.
void what_has_no_kernel_is_refused() {
  const auto comm = make_local_group(1, {60}, 0)[0];
  std::int8_t value = 1;
  for (const RedOp op : {RedOp::prod, RedOp::band, RedOp::sum}) {
    try {
      comm->all_reduce(&value, DType::i8, 1, op);
      require(false, "it is refused");
    } catch (const std::invalid_argument& error) {
      const std::string text = error.what();
      require(text.find("accepted on a CUDA device: sum, avg, max and min") != text.npos, text);
    }
  }
  const auto stream = make_cuda_stream(0);
  comm->barrier(0, stream->native());
}

// Before the rank has posted its call, and so before the others can know of it.
void a_rank_whose_device_fails_tells_the_others() {
  const auto group = make_local_group(2, {60}, 0);
  const auto barrier = [&](std::size_t rank) {
    cudaSetDevice(0);
    const auto stream = make_cuda_stream(0);
    try {
      if (rank == 1) fake_fail_next_record();
      group[rank]->barrier(0, stream->native());
      require(false, "the barrier fails");
    } catch (const CudaError& error) {
      require(rank == 1, error.what());
    } catch (const CommError& error) {
      const std::string text = error.what();
      require(text.find("rank 1 aborted: barrier: cudaEventRecord") == 0, text);
    }
  };
  std::thread other(barrier, 0);
  barrier(1);
  other.join();
}

// No stream is the default one of the group's device, whatever device is current. Rank 1 is late.
void another_device_may_be_current() {
  constexpr int kDevice = 2;
  const auto group = make_local_group(2, {60}, kDevice);
  const auto rank_main = [&](int rank) {
    float part = 0;
    std::vector<float> whole(2);
    const auto on_default_stream = [&](const std::function<void()>& work) {
      cudaSetDevice(kDevice);
      fake_enqueue(nullptr, work);
      cudaSetDevice(kDevice + 1);
    };
    on_default_stream([&] {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      part = static_cast<float>(rank + 1);
    });
    const Comm& comm = group[static_cast<std::size_t>(rank)];
    comm->all_gather(&part, DType::f32, whole.data(), DType::f32, 1);
    on_default_stream(
        [&] { require(whole == std::vector<float>{1, 2}, "all parts are gathered"); });
    on_default_stream([&] {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      part *= 3;
    });
    comm->broadcast(&part, DType::f32, 1, 1);
    on_default_stream([&] { require(part == 6, "the root's part is everywhere"); });
    cudaDeviceSynchronize();  // of the other device: nothing is on it
    cudaSetDevice(kDevice);
    cudaDeviceSynchronize();
  };
  std::thread other(rank_main, 1);
  rank_main(0);
  other.join();
}

}  // namespace

int main() {
  alarm(120);  // a hang is a failure
  a_rank_whose_device_fails_tells_the_others();
  what_has_no_kernel_is_refused();
  another_device_may_be_current();
  const std::uint32_t seed = std::random_device()();
  std::printf("seed %u\n", seed);
  const auto group = make_local_group(kRanks, {60}, 0);
  std::vector<std::thread> ranks;
  for (const Comm& comm : group) ranks.emplace_back([&comm, seed] { rank_main(comm, seed); });
  for (std::thread& rank : ranks) rank.join();
  std::puts("good");
  return 0;
}
