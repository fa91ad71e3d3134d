// The NCCL transport's collectives and memory, without a GPU and for every version that is played:
// right values, the paths that receipts tell, streams and graphs.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <future>
#include <limits>
#include <mutex>
#include <stdexcept>

#include "nccl_ranks.h"

namespace {

using namespace shardcomm;
using namespace shardcomm::test;

constexpr int kRanks = 3;

void gathers(const Comm& comm, NativeStream stream, const Queue& queue) {
  const int rank = comm->rank();
  const auto mine = static_cast<float>(rank + 1);
  constexpr int kPart = 100;
  const auto window = comm->allocate(kRanks * kPart * sizeof(float), Use::gather);
  auto* full = static_cast<float*>(window->data());
  require(std::all_of(full, full + kRanks * kPart, [](float x) { return x == 0; }), "zero");
  require(window->device() == rank, "memory knows its device");
  std::fill_n(full + rank * kPart, kPart, mine);
  comm->all_gather(full + rank * kPart, DType::f32, full, DType::f32, kPart, 0, stream);
  queue.finish();
  for (int i = 0; i < kRanks * kPart; ++i) require(full[i] == 1 + i / kPart, "gathered in place");

  const std::vector<float> shard(kPart, mine + 10);
  comm->all_gather(shard.data(), DType::f32, full, DType::f32, kPart, 0, stream);
  queue.finish();
  for (int i = 0; i < kRanks * kPart; ++i) require(full[i] == 11 + i / kPart, "gathered");

  std::vector<std::uint16_t> narrow(kRanks * kPart);
  comm->all_gather(shard.data(), DType::f32, narrow.data(), DType::bf16, kPart, 0, stream);
  queue.finish();
  for (int i = 0; i < kRanks * kPart; ++i) {
    require(narrow[static_cast<std::size_t>(i)] == bf16_of(11 + i / kPart), "and converted");
  }
}

// Rank r sends (r + 1) * (i + 1) as element i of every slice, so every rank's result is the same.
template <class T>
void reduce_of(const Comm& comm, DType dtype, const Queue& queue, T (*of)(int)) {
  constexpr int kPart = 37;
  const auto memory = comm->allocate(kRanks * kPart * sizeof(T), Use::reduce);
  std::vector<T> plain(kRanks * kPart);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    plain[i] = of((comm->rank() + 1) * (static_cast<int>(i % kPart) + 1));
  }
  std::memcpy(memory->data(), plain.data(), plain.size() * sizeof(T));
  for (const void* send :
       {static_cast<const void*>(plain.data()), static_cast<const void*>(memory->data())}) {
    for (const RedOp op : {RedOp::sum, RedOp::avg, RedOp::max, RedOp::min}) {
      const int factor = op == RedOp::sum ? 6 : op == RedOp::avg ? 2 : op == RedOp::max ? 3 : 1;
      std::vector<T> result(kPart, of(0));
      Epilogue epilogue;
      epilogue.dtype = dtype;
      comm->reduce_scatter(send, dtype, result.data(), epilogue, kPart, op, 0, queue.get());
      queue.finish();
      for (int i = 0; i < kPart; ++i) {
        require(result[static_cast<std::size_t>(i)] == of(factor * (i + 1)),
                std::string("reduce_scatter ") + name(dtype) + " " + name(op));
      }
    }
  }
  for (const RedOp op : {RedOp::sum, RedOp::avg, RedOp::max}) {
    std::vector<T> buffer = plain;
    const int factor = op == RedOp::sum ? 6 : op == RedOp::avg ? 2 : 3;
    comm->all_reduce(buffer.data(), dtype, kRanks * kPart, op, 0, queue.get());
    queue.finish();
    require(buffer[kPart - 1] == of(factor * kPart),
            std::string("all_reduce ") + name(dtype) + " " + name(op));
  }
}

// Rank 1's part is empty, and rank 2's is the longest.
const std::vector<std::int64_t> kCounts{3, 0, 40};

void uneven_gathers(const Comm& comm, const Queue& queue) {
  const Parts parts(kCounts);
  const auto own = static_cast<std::size_t>(parts.count(comm->rank()));
  const std::vector<float> shard(own, static_cast<float>(comm->rank() + 1));
  const auto window = comm->allocate(43 * sizeof(float), Use::gather);
  std::vector<std::uint16_t> narrow(43);
  auto* full = static_cast<float*>(window->data());
  const void* send = own == 0 ? nullptr : shard.data();
  comm->all_gather(send, DType::f32, full, DType::f32, parts, 0, queue.get());
  comm->all_gather(send, DType::f32, narrow.data(), DType::bf16, parts, 0, queue.get());
  queue.finish();
  require(receipt(comm, "all_gather").taken == "broadcasts", "a broadcast a rank");
  for (int i = 0; i < 43; ++i) {
    const float expected = i < 3 ? 1 : 3;
    require(full[i] == expected, "gathered uneven parts");
    require(narrow[static_cast<std::size_t>(i)] == bf16_of(expected), "and converted");
  }
}

// Element i of rank r's gradients is (r + 1) * i.
void uneven_reduces(const Comm& comm, const Queue& queue) {
  const Parts parts(kCounts);
  const int rank = comm->rank();
  const auto own = static_cast<std::size_t>(parts.count(rank));
  const auto memory = comm->allocate(43 * sizeof(float), Use::reduce);
  auto* wide = static_cast<float*>(memory->data());
  std::vector<std::uint16_t> narrow(43);
  for (int i = 0; i < 43; ++i) {
    wide[i] = static_cast<float>((rank + 1) * i);
    narrow[static_cast<std::size_t>(i)] = bf16_of(wide[i]);
  }
  const std::vector<float> apart(wide, wide + 43);  // not communication memory
  for (const void* send : {static_cast<const void*>(wide), static_cast<const void*>(apart.data()),
                           static_cast<const void*>(narrow.data())}) {
    const bool is_narrow = send == narrow.data();
    std::vector<float> result(own, 100);
    std::int32_t nonfinite = 0;
    comm->reduce_scatter(send, is_narrow ? DType::bf16 : DType::f32,
                         own == 0 ? nullptr : result.data(), {DType::f32, 0.5f, true, &nonfinite},
                         parts, RedOp::avg, 0, queue.get());
    queue.finish();
    const std::string taken = receipt(comm, "reduce_scatter").taken;
    require(taken == (is_narrow ? "exchange" : "reduces"), "its path: " + taken);
    for (std::size_t i = 0; i < own; ++i) {
      const auto value = static_cast<float>(static_cast<std::size_t>(parts.begin(rank)) + i);
      require(result[i] == 100 + value, "reduced uneven parts");  // the mean is 2 * value
    }
    require(nonfinite == 0, "all are finite");
  }
}

void epilogues(const Comm& comm, const Queue& queue) {
  constexpr int kPart = 64;
  const auto mine = static_cast<float>(comm->rank() + 1);
  const auto memory = comm->allocate(kRanks * kPart * sizeof(float), Use::reduce);
  auto* full = static_cast<float*>(memory->data());
  std::fill_n(full, kRanks * kPart, mine);
  std::vector<std::uint16_t> narrow(kRanks * kPart, bf16_of(mine));
  std::vector<float> result(kPart, 10);
  comm->reduce_scatter(full, DType::f32, result.data(), {DType::f32, 0.5f, true}, kPart, RedOp::sum,
                       0, queue.get());
  comm->reduce_scatter(narrow.data(), DType::bf16, result.data(), {DType::f32, 2.0f, true}, kPart,
                       RedOp::avg, 0, queue.get());
  queue.finish();
  require(result[kPart - 1] == 10 + 3 + 4, "scaled, accumulated, averaged");

  for (const Epilogue& each : {Epilogue{}, Epilogue{DType::f32, 0.5f, true}}) {
    for (const bool exchanged : {false, true}) {
      std::int32_t nonfinite = 0;
      Epilogue epilogue = each;
      epilogue.nonfinite = &nonfinite;
      for (const bool bad : {false, true}) {
        result.assign(kPart, 0);
        full[0] = bad ? std::numeric_limits<float>::infinity() : 1.0f;
        narrow[0] = bad ? 0x7f80 : 0x3f80;
        const void* send = exchanged ? static_cast<const void*>(narrow.data()) : full;
        comm->reduce_scatter(send, exchanged ? DType::bf16 : DType::f32, result.data(), epilogue,
                             kPart, RedOp::sum, 0, queue.get());
        queue.finish();
        require(nonfinite == (bad && comm->rank() == 0), "the flag tells of this rank's part");
      }
    }
  }
}

// Large parts, as what is small goes by a protocol that knows no registration. Whole numbers, which
// bf16 has; all ranks send out of communication memory, or none.
void large_reduces(const Comm& comm, const Queue& queue) {
  const int rank = comm->rank();
  for (const std::vector<std::int64_t>& counts :
       {std::vector<std::int64_t>{10000, 10000, 10000}, {10000, 12000, 9000}, {0, 30000, 10000}}) {
    const Parts parts(counts);
    const std::int64_t total = parts.total(kRanks);
    std::vector<std::uint16_t> plain(static_cast<std::size_t>(total));
    for (std::size_t i = 0; i < plain.size(); ++i) {
      plain[i] = bf16_of(static_cast<float>(i % 40 * (static_cast<std::size_t>(rank) + 1)));
    }
    const auto memory = comm->allocate(plain.size() * 2, Use::reduce);
    std::memcpy(memory->data(), plain.data(), plain.size() * 2);
    for (const void* send :
         {static_cast<const void*>(memory->data()), static_cast<const void*>(plain.data())}) {
      std::vector<float> result(static_cast<std::size_t>(parts.count(rank)));
      comm->reduce_scatter(send, DType::bf16, result.data(), {}, parts, RedOp::sum, 0, queue.get());
      queue.finish();
      for (std::size_t i = 0; i < result.size(); ++i) {
        const std::size_t place = static_cast<std::size_t>(parts.begin(rank)) + i;
        require(result[i] == static_cast<float>(6 * (place % 40)), "a large sum");
      }
    }
  }
}

void large_uneven_gathers(const Comm& comm, const Queue& queue) {
  const Parts parts({15000, 0, 20000});
  const auto own = static_cast<std::size_t>(parts.count(comm->rank()));
  const std::vector<float> shard(own, static_cast<float>(comm->rank() + 1));
  const auto memory = comm->allocate(35000 * sizeof(float), Use::gather);
  auto* full = static_cast<float*>(memory->data());
  comm->all_gather(own == 0 ? nullptr : shard.data(), DType::f32, full, DType::f32, parts, 0,
                   queue.get());
  queue.finish();
  for (int i = 0; i < 35000; ++i) require(full[i] == (i < 15000 ? 1 : 3), "gathered large parts");
}

void collectives(const Comm& comm) {
  const Queue queue(comm);
  gathers(comm, queue.get(), queue);
  reduce_of<float>(comm, DType::f32, queue, [](int x) { return static_cast<float>(x); });
  reduce_of<double>(comm, DType::f64, queue, [](int x) { return static_cast<double>(x); });
  reduce_of<std::int32_t>(comm, DType::i32, queue, [](int x) { return x; });
  reduce_of<std::int64_t>(comm, DType::i64, queue, [](int x) { return std::int64_t{x}; });
  reduce_of<std::uint16_t>(comm, DType::bf16, queue,
                           [](int x) { return bf16_of(static_cast<float>(x)); });
  epilogues(comm, queue);
  uneven_gathers(comm, queue);
  uneven_reduces(comm, queue);
  large_uneven_gathers(comm, queue);
  large_reduces(comm, queue);
  float value = static_cast<float>(comm->rank() + 1);
  comm->broadcast(&value, DType::f32, 1, 1, queue.get());
  comm->barrier(0, queue.get());
  queue.finish();
  require(value == 2, "broadcast");
  comm->all_gather(nullptr, DType::f32, nullptr, DType::f32, 0, 0, queue.get());
}

// What `allocate` takes where NCCL has `windows`, in this version.
const char* path_of(FakeWindows windows) {
  if (version() < 21900 || windows == FakeWindows::none) return "plain";
  if (version() < 22800) return "local";  // 2.27 does not tell
  return windows == FakeWindows::symmetric ? "window" : "local";
}

void memory(const char* name, FakeWindows windows) {
  Setting setting;
  setting.fake.windows = setting.connected.windows = windows;
  on_ranks(name, setting, [windows](const Comm& comm) {
    collectives(comm);
    const auto outlives = comm->allocate(64, Use::gather);
    const Receipt allocated = receipt(comm, "allocate");
    require(allocated.taken == path_of(windows), "memory is " + allocated.taken);
    require((allocated.taken == "window") == allocated.reason.empty(), allocated.reason);
    require(receipt(comm, "reduce_scatter").taken == "exchange", "bf16's path");
    comm->close();
    comm->close();
    require_text(comm_error([&] { comm->barrier(); }), "has closed the communicator");
    require(static_cast<char*>(outlives->data())[63] == 0, "memory outlives");
  });
}

// From memory that is a window, NCCL's reduce-scatter has both sides in windows, and no average.
void symmetric_kernels_are_taken() {
  on_ranks("symmetric kernels", {}, [](const Comm& comm) {
    const Queue queue(comm);
    const auto window = comm->allocate(kRanks * 4096, Use::gather);
    const auto own = comm->allocate(kRanks * 4096, Use::reduce);
    const std::vector<float> shard(1024, 1);
    std::vector<float> result(1024);
    comm->all_gather(shard.data(), DType::f32, window->data(), DType::f32, 1024, 0, queue.get());
    comm->reduce_scatter(own->data(), DType::f32, result.data(), {}, 1024, RedOp::avg, 0,
                         queue.get());
    queue.finish();
    comm->barrier(0, queue.get());
    queue.finish();
  });
  const FakeNcclCounts done = counts();
  const int symmetric = version() >= 22700 ? kRanks : 0;
  require(done.scatters_symmetric == symmetric, "reduce-scatters by symmetric kernels");
  require(done.gathers_symmetric == symmetric, "gathers by symmetric kernels");
  require(done.averages_premultiplied == 0, "no average of NCCL's");
}

// Out of communication memory into what is registered for it: without a copy in NCCL's own buffers.
void large_messages_are_written_directly() {
  on_ranks("direct messages", {}, [](const Comm& comm) {
    const Queue queue(comm);
    const auto memory = comm->allocate(kRanks * 20000, Use::reduce);
    std::vector<float> result(10000);
    comm->reduce_scatter(memory->data(), DType::bf16, result.data(), {}, 10000, RedOp::sum, 0,
                         queue.get());
    queue.finish();
  });
  const int all = kRanks * (kRanks - 1);
  require(counts().messages_direct == (version() >= 21900 ? all : 0), "each message");
}

void cta_policies() {
  Setting zero;
  zero.cta_policy = CtaPolicy::zero;
  if (version() < 22800) {
    try {
      make_nccl(nccl_unique_id(), 0, 1, 0, {20, CtaPolicy::zero, ""});
      require(false, "it is refused");
    } catch (const std::invalid_argument& error) {
      require_text(error.what(), "cta_policy is 'zero', which needs NCCL 2.28; this is ");
    }
    return;
  }
  on_ranks("copy engines", zero, [](const Comm& comm) {
    const Queue queue(comm);
    const auto window = comm->allocate(kRanks * 4096, Use::gather);
    const std::vector<float> shard(1024, 1);
    comm->all_gather(shard.data(), DType::f32, window->data(), DType::f32, 1024, 0, queue.get());
    queue.finish();
    require(static_cast<float*>(window->data())[kRanks * 1024 - 1] == 1, "gathered");
  });
  require(counts().cta_policy == 2, "the policy reaches NCCL");
  require(counts().gathers_copy_engine == kRanks, "gathers by copy engines");
}

void gathers_and_reduces_at_once(const Comm& comm) {
  const Queue gathers(comm);
  const Queue reduces(comm);
  std::vector<float> full(kRanks * 64);
  std::vector<float> value(64, 1);
  std::thread thread([&] {
    const std::vector<float> shard(64, static_cast<float>(comm->rank()));
    for (int i = 0; i < 400; ++i) {
      comm->all_gather(shard.data(), DType::f32, full.data(), DType::f32, 64, 0, gathers.get());
    }
    gathers.finish();
  });
  for (int i = 0; i < 400; ++i) {
    comm->all_reduce(value.data(), DType::f32, 64, RedOp::max, 0, reduces.get());
  }
  thread.join();
  reduces.finish();
  require(full.back() == kRanks - 1 && value[0] == 1, "both are right");
}

// Two reduces out of one memory leave NCCL's result in the same place, whatever their streams.
void streams_of_a_channel_keep_its_order(const Comm& comm) {
  const Queue first(comm);
  const Queue second(comm);
  constexpr int kPart = 256;
  const auto memory = comm->allocate(kRanks * kPart * sizeof(float), Use::reduce);
  auto* full = static_cast<float*>(memory->data());
  std::fill_n(full, kRanks * kPart, 1.0f);
  std::vector<float> results[2] = {std::vector<float>(kPart), std::vector<float>(kPart)};
  for (int round = 0; round < 50; ++round) {
    comm->reduce_scatter(full, DType::f32, results[0].data(), {DType::f32, 1.0f, true}, kPart,
                         RedOp::sum, 0, first.get());
    comm->reduce_scatter(full, DType::f32, results[1].data(), {DType::f32, 2.0f, true}, kPart,
                         RedOp::max, 0, second.get());
  }
  first.finish();
  second.finish();
  for (int i = 0; i < kPart; ++i) {
    require(results[0][static_cast<std::size_t>(i)] == 150, "sums on the first stream");
    require(results[1][static_cast<std::size_t>(i)] == 100, "maxima on the second");
  }
}

// Products are NCCL's own, but where it would round them at every step; the rest of what a host has
// is refused in a sentence, and the group goes on.
void products_and_what_is_refused(const Comm& comm) {
  const Queue queue(comm);
  const auto refuses = [](const auto& call, const char* part) {
    try {
      call();
      require(false, std::string("it is refused: ") + part);
    } catch (const std::invalid_argument& error) {
      require_text(error.what(), part);
    }
  };
  std::vector<float> two(kRanks * 8, 2);
  std::vector<float> part(8, 1);
  comm->reduce_scatter(two.data(), DType::f32, part.data(), {DType::f32, 0.5f, true}, 8,
                       RedOp::prod, 0, queue.get());
  std::vector<std::int32_t> wrapped(8, 1 << 20);
  comm->all_reduce(wrapped.data(), DType::i32, 8, RedOp::prod, 0, queue.get());
  queue.finish();
  require(part[7] == 1 + 0.5f * static_cast<float>(1 << kRanks), "a product, scaled and added");
  require(wrapped[0] == 0, "2^40 and more wrap to 0");
  for (const DType dtype : {DType::f16, DType::bf16, DType::i8}) {
    refuses([&] { comm->all_reduce(two.data(), dtype, 8, RedOp::prod, 0, queue.get()); },
            "op is prod, of elements of ");
  }
  refuses([&] { comm->all_reduce(two.data(), DType::i8, 8, RedOp::sum, 0, queue.get()); },
          "op is sum, of elements of i8; accepted on a CUDA device: sum, avg, max and min");
  refuses(
      [&] {
        comm->reduce_scatter(two.data(), DType::i32, part.data(), {DType::i32}, 2, RedOp::bor, 0,
                             queue.get());
      },
      "op is bor");
  const Parts parts(1);
  refuses([&] { comm->all_to_all(two.data(), parts, part.data(), parts, DType::f32); },
          "all_to_all: the nccl transport has none; call ncclSend and ncclRecv for each rank");
  refuses([&] { comm->gather(part.data(), two.data(), DType::f32, 1, 0); },
          "gather: the nccl transport has none; call all_gather");
  refuses([&] { comm->scatter(two.data(), part.data(), DType::f32, 1, 0); },
          "scatter: the nccl transport has none; call broadcast");
  refuses([&] { comm->reduce(part.data(), two.data(), DType::f32, 8, RedOp::sum, 0); },
          "reduce: the nccl transport has none; call all_reduce");
  comm->barrier(0, queue.get());
  queue.finish();
}

// More than are watched at once, behind computation that takes longer than the deadline.
void computation_is_not_late(const Comm& comm) {
  const Queue queue(comm);
  std::vector<float> value(8, 1);
  comm->all_reduce(value.data(), DType::f32, 8, RedOp::max, 0, queue.get());
  queue.finish();
  fake_enqueue(queue.cuda(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(1500)); });
  for (int i = 0; i < 600; ++i) {
    comm->all_reduce(value.data(), DType::f32, 8, RedOp::max, 0, queue.get());
  }
  queue.finish();
  comm->barrier(0, queue.get());
  queue.finish();
}

// A gather and a reduce in a graph, on two streams, launched again with other values.
void graphs(const Comm& comm) {
  const Queue queue(comm);
  Queue side(comm);
  constexpr int kPart = 128;
  const auto window = comm->allocate(kRanks * kPart * sizeof(float), Use::gather);
  const auto memory = comm->allocate(kRanks * kPart * sizeof(float), Use::reduce);
  auto* full = static_cast<float*>(memory->data());
  std::vector<float> shard(kPart);
  std::vector<float> result(kPart);
  // NCCL registers by itself what a graph uses, where it can.
  constexpr int kWide = 10000;
  std::vector<std::uint16_t> narrow(kRanks * kWide, bf16_of(1));
  const auto used = comm->allocate(narrow.size() * 2, Use::reduce);
  const auto unused = comm->allocate(narrow.size() * 2, Use::reduce);
  std::vector<float> sum(kWide);
  const auto sums = [&](std::initializer_list<void*> sent) {
    for (const void* send : sent) {
      comm->reduce_scatter(send, DType::bf16, sum.data(), {DType::f32, 1.0f, true}, kWide,
                           RedOp::sum, 0, queue.get());
    }
  };
  for (const auto& each : {used, unused}) {
    std::memcpy(each->data(), narrow.data(), narrow.size() * 2);
  }
  const auto step = [&] {
    comm->all_gather(shard.data(), DType::f32, window->data(), DType::f32, kPart, 0, queue.get());
    side.stream().wait(borrow_cuda_stream(comm->rank(), queue.get())->record());
    for (int i = 0; i < 2; ++i) {
      comm->reduce_scatter(full, DType::f32, result.data(), {}, kPart, RedOp::sum, 0,
                           i == 0 ? side.get() : queue.get());
    }
    borrow_cuda_stream(comm->rank(), queue.get())->wait(side.stream().record());
  };
  step();  // connects
  sums({narrow.data(), used->data()});
  queue.finish();
  comm->barrier(0, queue.get());
  queue.finish();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  {
    // Ranks are processes elsewhere: here a capture forbids the other ranks' threads what it does
    // not forbid other processes, so they wait. The watchdogs look on.
    static Latch quiet(kRanks);
    quiet.arrive_and_wait();
    static std::mutex capturing;
    std::unique_lock<std::mutex> lock(capturing);
    const cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    require(cudaStreamBeginCapture(queue.cuda(), mode) == cudaSuccess, "begin");
    step();
    sums({narrow.data(), used->data(), unused->data()});
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
    require(cudaStreamEndCapture(queue.cuda(), &graph) == cudaSuccess, "the capture is whole");
    lock.unlock();
    static Latch captured(kRanks);
    captured.arrive_and_wait();
  }
  require(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess, "instantiate");
  for (int round = 1; round <= 3; ++round) {
    std::fill(shard.begin(), shard.end(), static_cast<float>(10 * round + comm->rank()));
    std::fill_n(full, kRanks * kPart, static_cast<float>(round));
    require(cudaGraphLaunch(executable, queue.cuda()) == cudaSuccess, "launch");
    queue.finish();
    require(static_cast<float*>(window->data())[kPart] == static_cast<float>(10 * round + 1),
            "gathered in the graph");
    require(result[kPart - 1] == static_cast<float>(kRanks * round), "reduced in the graph");
    require(sum[kWide - 1] == static_cast<float>(kRanks * (2 + 3 * round)), "and 16-bit floats");
    comm->barrier(0, queue.get());  // before anyone writes again
    queue.finish();
  }
  // NCCL cannot end while the graph lives: closing does not wait for that, and what the graph uses
  // stays.
  std::fill(shard.begin(), shard.end(), 7.0f);
  require(cudaGraphLaunch(executable, queue.cuda()) == cudaSuccess, "launch");
  const auto begin = Clock::now();
  comm->close();
  require(seconds_since(begin) < 5, "closing waits for no graph");
  require(counts().live == 2 * kRanks, "nothing has ended yet");
  queue.finish();
  require(static_cast<float*>(window->data())[0] == 7, "the graph still gathers");
  static Latch closed(kRanks);
  closed.arrive_and_wait();
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

// Memory goes when its owner lets go of it: on any thread, at any time, in any order.
void memory_is_let_go_of() {
  Setting setting;
  setting.deadline_s = 1;
  on_ranks("memory is let go of", setting, [](const Comm& comm) {
    const Queue queue(comm);
    auto first = comm->allocate(4096, Use::gather);
    auto second = comm->allocate(4096, Use::gather);
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));  // nobody is late
    std::thread other([&] {
      for (int i = 0; i < 20; ++i) first = nullptr;
      auto& kept = comm->rank() == 0 ? first : second;
      if (comm->rank() != 0) kept = nullptr;
    });
    float value = 1;
    for (int i = 0; i < 50; ++i) comm->broadcast(&value, DType::f32, 1, 0, queue.get());
    queue.finish();
    other.join();
    // Rank 0 still has one that the others do not have: the next is no window.
    const auto third = comm->allocate(4096, Use::gather);
    const Receipt apart = receipt(comm, "allocate");
    if (version() >= 22700) {
      require(apart.taken == "local", "it is " + apart.taken);
      require_text(apart.reason, "the ranks hold different windows");
    }
    second = nullptr;
    const auto fourth = comm->allocate(4096, Use::gather);
    require(receipt(comm, "allocate").taken == path_of(FakeWindows::symmetric), "it is again");
    comm->barrier(0, queue.get());
    queue.finish();
  });
}

// On the threads of its own, and on any thread that asks: a context takes half a gigabyte.
void a_rank_uses_its_own_device_alone() {
  std::printf("devices\n");
  const std::string id = nccl_unique_id();
  const long before = fake_calls_on(0);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&id, rank] {
      const int device = rank + 1;
      const Comm comm = make_nccl(id, rank, 2, device, {20, CtaPolicy::standard, "one"});
      const auto stream = make_cuda_stream(device);
      std::promise<void> go;
      stream->enqueue([&](NativeStream native) {
        fake_enqueue(static_cast<cudaStream_t>(native), [&] { go.get_future().wait(); });
      });
      comm->barrier(0, stream->native());
      std::thread([&] { require_text(comm->pending()[0].call, "barrier"); }).join();
      go.set_value();
      stream->record()->wait();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  require_nothing_left();
  require(fake_calls_on(0) == before, "no rank has a context on device 0");
}

// What set-up fills must not come late: the streams of set-up do not wait for the default one.
void set_up_leaves_nothing_on_the_default_stream() {
  std::printf("default stream\n");
  const std::string id = nccl_unique_id();
  std::promise<void> connected;
  cudaSetDevice(0);
  // A caller's work, for longer than it takes to connect.
  fake_enqueue(nullptr, [done = connected.get_future().share()] {
    done.wait_for(std::chrono::milliseconds(200));
  });
  const Comm comm = make_nccl(id, 0, 1, 0);
  require(cudaStreamQuery(nullptr) == cudaSuccess, "all of it has run");
  connected.set_value();
}

}  // namespace

int main(int, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  load(arguments[1]);
  std::printf("NCCL %d\n", version());
  memory("symmetric windows", FakeWindows::symmetric);
  memory("local registration", FakeWindows::local);
  memory("no registration", FakeWindows::none);
  symmetric_kernels_are_taken();
  large_messages_are_written_directly();
  cta_policies();
  on_ranks("both channels", {}, gathers_and_reduces_at_once);
  on_ranks("products", {}, products_and_what_is_refused);
  on_ranks("two streams", {}, streams_of_a_channel_keep_its_order);
  Setting soon;
  soon.deadline_s = 1;
  on_ranks("behind computation", soon, computation_is_not_late);
  on_ranks("graph", {}, graphs);
  memory_is_let_go_of();
  a_rank_uses_its_own_device_alone();
  set_up_leaves_nothing_on_the_default_stream();
  std::puts("good");
  return 0;
}
