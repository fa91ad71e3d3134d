#include "faults/operations.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace faults {
namespace {

using shardcomm::CommError;
using shardcomm::DType;
using shardcomm::NativeStream;
using shardcomm::RedOp;
using shardcomm::Use;

constexpr std::int64_t kFew = 1000;
constexpr std::int64_t kMany = 20'000;     // too many to go with the call
constexpr std::int64_t kChunks = 300'000;  // two chunks of the staging area, of 1 MiB each

// Small integers, whose sums are exact.
float value(int rank, std::int64_t i) { return static_cast<float>((rank * 37 + i * 11) % 17 - 8); }
float total(const Rank& own, std::int64_t i) {
  float sum = 0;
  for (int r = 0; r < own.size; ++r) sum += value(r, i);
  return sum;
}

template <class Want>
std::string expect(const char* what, const float* have, std::int64_t count, const Want& want) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (have[i] != want(i)) {
      return std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(have[i]) +
             ", not " + std::to_string(want(i));
    }
  }
  return "";
}

std::string right(const Rank&) { return ""; }

// `count` elements a rank in `send`, and room for all ranks' in `recv`.
std::function<void(Rank&)> attached(std::int64_t count = 0) {
  return [count](Rank& own) {
    own.join();
    own.attach();
    own.member.reset();
    own.send.resize(static_cast<std::size_t>(count * own.size));
    for (std::int64_t i = 0; i < count * own.size; ++i) {
      own.send[static_cast<std::size_t>(i)] = value(own.rank, i);
    }
    own.recv.assign(own.send.size(), 0.0f);
  };
}
std::function<void(Rank&)> with_memory(std::int64_t count) {
  return [count](Rank& own) {
    attached(count)(own);
    const std::size_t bytes = own.send.size() * sizeof(float);
    own.gather = own.comm->allocate(bytes, Use::gather);
    own.reduce = own.comm->allocate(bytes, Use::reduce);
    std::copy(own.send.begin(), own.send.end(), static_cast<float*>(own.reduce->data()));
    own.comm->barrier();
  };
}

void gather_into(Rank& own, void* recv) {
  own.comm->all_gather(own.send.data(), DType::f32, recv, DType::f32,
                       static_cast<std::int64_t>(own.send.size()) / own.size);
}
void gather_private(Rank& own) { gather_into(own, own.recv.data()); }
void gather_to_window(Rank& own) { gather_into(own, own.gather->data()); }
void gather_from_memory(Rank& own) {
  own.comm->all_gather(own.reduce->data(), DType::f32, own.recv.data(), DType::f32,
                       static_cast<std::int64_t>(own.send.size()) / own.size);
}
std::string wrong_gather(const Rank& own, const float* have) {
  const std::int64_t part = static_cast<std::int64_t>(own.send.size()) / own.size;
  return expect("recv", have, part * own.size,
                [part](std::int64_t i) { return value(static_cast<int>(i / part), i % part); });
}
std::string wrong_private_gather(const Rank& own) { return wrong_gather(own, own.recv.data()); }
std::string wrong_window_gather(const Rank& own) {
  return wrong_gather(own, static_cast<const float*>(own.gather->data()));
}

void reduce_from(Rank& own, const void* send) {
  own.comm->reduce_scatter(send, DType::f32, own.recv.data(), {},
                           static_cast<std::int64_t>(own.send.size()) / own.size, RedOp::sum);
}
void reduce_private(Rank& own) { reduce_from(own, own.send.data()); }
void reduce_memory(Rank& own) { reduce_from(own, own.reduce->data()); }
std::string wrong_reduce(const Rank& own) {
  const std::int64_t part = static_cast<std::int64_t>(own.send.size()) / own.size;
  return expect("recv", own.recv.data(), part,
                [&](std::int64_t i) { return total(own, own.rank * part + i); });
}

void sum_in(Rank& own, void* buffer) {
  own.comm->all_reduce(buffer, DType::f32, static_cast<std::int64_t>(own.send.size()), RedOp::sum);
}
std::string wrong_sum(const Rank& own, const void* have) {
  return expect("buffer", static_cast<const float*>(have),
                static_cast<std::int64_t>(own.send.size()),
                [&](std::int64_t i) { return total(own, i); });
}

void broadcast_in(Rank& own, void* buffer) {
  own.comm->broadcast(buffer, DType::f32, static_cast<std::int64_t>(own.send.size()), own.size - 1);
}
std::string wrong_broadcast(const Rank& own, const void* have) {
  return expect("buffer", static_cast<const float*>(have),
                static_cast<std::int64_t>(own.send.size()),
                [&](std::int64_t i) { return value(own.size - 1, i); });
}

// How many elements of `send` are for one rank.
std::int64_t part_of(const Rank& own) {
  return static_cast<std::int64_t>(own.send.size()) / own.size;
}

// Of each rank the part for this one.
void exchange_from(Rank& own, const void* send) {
  const shardcomm::Parts parts(part_of(own));
  own.comm->all_to_all(send, parts, own.recv.data(), parts, DType::f32);
}
void exchange_private(Rank& own) { exchange_from(own, own.send.data()); }
void exchange_memory(Rank& own) { exchange_from(own, own.reduce->data()); }
std::string wrong_exchange(const Rank& own) {
  const std::int64_t part = part_of(own);
  return expect("recv", own.recv.data(), part * own.size, [&](std::int64_t i) {
    return value(static_cast<int>(i / part), own.rank * part + i % part);
  });
}

// The root is rank 1, which is the victim at times.
constexpr int kRoot = 1;

void gather_to_root(Rank& own) {
  own.comm->gather(own.send.data(), own.recv.data(), DType::f32, part_of(own), kRoot);
}
std::string wrong_at_root(const Rank& own) {
  return own.rank == kRoot ? wrong_private_gather(own) : "";
}

void scatter_from(Rank& own, const void* send) {
  own.comm->scatter(send, own.recv.data(), DType::f32, part_of(own), kRoot);
}
std::string wrong_scatter(const Rank& own) {
  const std::int64_t part = part_of(own);
  return expect("recv", own.recv.data(), part,
                [&](std::int64_t i) { return value(kRoot, own.rank * part + i); });
}

void reduce_to_root(Rank& own, const void* send) {
  own.comm->reduce(send, own.recv.data(), DType::f32, static_cast<std::int64_t>(own.send.size()),
                   RedOp::sum, kRoot);
}
std::string wrong_total(const Rank& own) {
  return own.rank == kRoot ? wrong_sum(own, own.recv.data()) : "";
}

Operation allocate(const char* name, Use use) {
  return {name, attached(), [use](Rank& own) { own.gather = own.comm->allocate(100'000, use); },
          [](const Rank& own) {
            const auto* bytes = static_cast<const char*>(own.gather->data());
            return std::string(
                std::all_of(bytes, bytes + own.gather->bytes(), [](char c) { return c == 0; })
                    ? ""
                    : "memory is not zero");
          }};
}

// As a training step has it: gathers on one stream, reduces on another, and events for both.
void queue_on_streams(Rank& own) {
  const auto gathers = shardcomm::make_thread_stream();
  const auto reduces = shardcomm::make_thread_stream();
  gathers->enqueue([&own](NativeStream) { gather_to_window(own); });
  reduces->wait(gathers->record());
  reduces->enqueue([&own](NativeStream) { reduce_memory(own); });
  gathers->record()->wait();
  reduces->record()->wait();
}

// What cannot be queued, the communicator does not know of.
void on_streams(Rank& own) {
  try {
    queue_on_streams(own);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    own.comm->abort(error.what());
    throw;
  }
}

// What the others do while the victim leaves, and what they must hear.
void barrier_until(Rank& own, const char* expected) {
  try {
    own.comm->barrier();
  } catch (const CommError& error) {
    if (std::string(error.what()).find(expected) == std::string::npos) throw;
    return;
  }
  throw CommError("the barrier passed without the victim");
}

}  // namespace

void Rank::let_go() {
  gather = nullptr;
  reduce = nullptr;
  comm = nullptr;
}

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all{
      {"session, member", [](Rank&) {},
       [](Rank& own) {
         const shardcomm::ShmSession session(own.size);
         own.address = session.address();
         own.join();
       },
       right, /*ends=*/true},
      {"attach", [](Rank& own) { own.join(); }, [](Rank& own) { own.attach(); }, right},
      allocate("allocate (gather)", Use::gather),
      allocate("allocate (reduce)", Use::reduce),
      {"all_gather, window", with_memory(kFew), gather_to_window, wrong_window_gather},
      {"all_gather, direct", with_memory(kMany), gather_from_memory, wrong_private_gather},
      {"all_gather, inline", attached(kFew), gather_private, wrong_private_gather},
      {"all_gather, two chunks", attached(kChunks), gather_private, wrong_private_gather},
      {"reduce_scatter, direct", with_memory(kMany), reduce_memory, wrong_reduce},
      {"reduce_scatter, inline", attached(kFew), reduce_private, wrong_reduce},
      {"reduce_scatter, chunks", attached(kChunks), reduce_private, wrong_reduce},
      {"all_reduce, direct", with_memory(kMany), [](Rank& own) { sum_in(own, own.reduce->data()); },
       [](const Rank& own) { return wrong_sum(own, own.reduce->data()); }},
      {"all_reduce, inline", attached(kFew), [](Rank& own) { sum_in(own, own.send.data()); },
       [](const Rank& own) { return wrong_sum(own, own.send.data()); }},
      {"broadcast, direct", with_memory(kMany),
       [](Rank& own) { broadcast_in(own, own.reduce->data()); },
       [](const Rank& own) { return wrong_broadcast(own, own.reduce->data()); }},
      {"broadcast, inline", attached(kFew), [](Rank& own) { broadcast_in(own, own.send.data()); },
       [](const Rank& own) { return wrong_broadcast(own, own.send.data()); }},
      {"broadcast, chunks", attached(kChunks),
       [](Rank& own) { broadcast_in(own, own.send.data()); },
       [](const Rank& own) { return wrong_broadcast(own, own.send.data()); }},
      {"all_to_all, direct", with_memory(kMany), exchange_memory, wrong_exchange},
      {"all_to_all, inline", attached(kFew), exchange_private, wrong_exchange},
      {"all_to_all, chunks", attached(kChunks), exchange_private, wrong_exchange},
      {"gather, inline", attached(kFew), gather_to_root, wrong_at_root},
      {"gather, two chunks", attached(kChunks), gather_to_root, wrong_at_root},
      {"scatter, direct", with_memory(kMany),
       [](Rank& own) { scatter_from(own, own.reduce->data()); }, wrong_scatter},
      {"scatter, chunks", attached(kChunks / 2),
       [](Rank& own) { scatter_from(own, own.send.data()); }, wrong_scatter},
      {"reduce, direct", with_memory(kMany),
       [](Rank& own) { reduce_to_root(own, own.reduce->data()); }, wrong_total},
      {"reduce, chunks", attached(kChunks / 2),
       [](Rank& own) { reduce_to_root(own, own.send.data()); }, wrong_total},
      {"barrier", attached(), [](Rank& own) { own.comm->barrier(); }, right},
      {"on streams", with_memory(kFew), on_streams,
       [](const Rank& own) { return wrong_window_gather(own) + wrong_reduce(own); }},
      {"abort", attached(),
       [](Rank& own) {
         if (own.rank == own.victim) return own.comm->abort("enough");
         barrier_until(own, "enough");
       },
       right, /*ends=*/true},
      {"close", attached(),
       [](Rank& own) {
         if (own.rank == own.victim) return own.comm->close();
         barrier_until(own, "closed");
       },
       right, /*ends=*/true},
      {"let go of memory, close", with_memory(kFew), [](Rank& own) { own.let_go(); }, right,
       /*ends=*/true},
  };
  return all;
}

std::string go_on(Rank& own) {
  // The victim waits so long that it looks for trouble, and must find none.
  if (own.rank != own.victim) usleep(120'000);
  own.comm->barrier();
  std::vector<float> sum(100);
  for (std::int64_t i = 0; i < 100; ++i) sum[static_cast<std::size_t>(i)] = value(own.rank, i);
  own.comm->all_reduce(sum.data(), DType::f32, 100, RedOp::sum);
  return expect("the next sum", sum.data(), 100, [&](std::int64_t i) { return total(own, i); });
}

}  // namespace faults
