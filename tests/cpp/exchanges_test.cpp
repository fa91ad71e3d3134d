// all_to_all, gather, scatter and reduce, and every operation on every dtype, against what the test
// computes itself.
//
//   exchanges_test [SEED]
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "random_program.h"
#include "ranks.h"
#include "shardcomm/communicator.h"

namespace {

using namespace ranks;

// Where a part of the staging area goes to one of `slots` ranks.
std::int64_t near_slot(std::int64_t slots) { return kChunk / slots / 64 * 64; }

void all_to_all(Program& program) {
  Communicator& comm = program.comm;
  const int size = comm.size();
  const auto ranks = static_cast<std::size_t>(size);
  const DType dtype = program.pick<DType>({DType::u8, DType::bf16, DType::i32, DType::f64});
  const auto item = static_cast<std::int64_t>(itemsize(dtype));
  const std::int64_t limit = program.pick<std::int64_t>(
      {10, kInline / size / size, kInline / size, near_slot(std::max(1, size - 1))});
  const int key = static_cast<int>(program.draw(1000));
  std::vector<std::vector<std::int64_t>> counts(ranks, std::vector<std::int64_t>(ranks));
  for (auto& row : counts) {
    for (auto& count : row) {
      if (program.draw(3) > 0) count = program.size_near(limit) / item;
    }
  }
  std::vector<std::int64_t> sent, received;
  Bytes send, want;
  const auto part = [&](int from, int to) {
    const auto count = counts[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
    return bytes_of(key + from * 5 + to, count * item);
  };
  for (int r = 0; r < size; ++r) {
    const Bytes out = part(comm.rank(), r);
    const Bytes in = part(r, comm.rank());
    send.insert(send.end(), out.begin(), out.end());
    want.insert(want.end(), in.begin(), in.end());
    sent.push_back(static_cast<std::int64_t>(out.size()) / item);
    received.push_back(static_cast<std::int64_t>(in.size()) / item);
  }
  std::byte* from = program.memory(static_cast<std::int64_t>(send.size()));
  std::byte* to = program.memory(static_cast<std::int64_t>(want.size()));
  if (!send.empty()) std::memcpy(from, send.data(), send.size());
  comm.all_to_all(from, Parts(sent), to, Parts(received), dtype, key);
  program.same(to, want, "all_to_all");
  program.same(from, send, "all_to_all leaves what it sends");
  program.done("all_to_all");
}

void gather(Program& program) {
  Communicator& comm = program.comm;
  const int size = comm.size();
  const int root = static_cast<int>(program.draw(size - 1));
  const DType dtype = program.pick<DType>({DType::u8, DType::i32, DType::f64});
  const auto width = static_cast<std::int64_t>(itemsize(dtype));
  const std::int64_t count =
      program.size_near(program.pick<std::int64_t>({10, kInline / size, kChunk}) / width);
  const std::int64_t bytes = count * width;
  const bool in_place = program.draw(3) == 0;
  const int key = static_cast<int>(program.draw(1000));
  std::byte* recv = program.memory(bytes * size);
  std::byte* send = program.memory(bytes);
  const bool is_root = comm.rank() == root;
  if (is_root && in_place) send = recv + root * bytes;
  const Bytes own = bytes_of(key + comm.rank(), bytes);
  if (bytes > 0) std::memcpy(send, own.data(), own.size());
  comm.gather(send, is_root ? recv : nullptr, dtype, count, root, key);
  for (int r = 0; is_root && r < size; ++r) {
    program.same(recv + r * bytes, bytes_of(key + r, bytes), "gather");
  }
  program.same(send, own, "gather leaves what it sends");
  program.done("gather");
}

void scatter(Program& program) {
  Communicator& comm = program.comm;
  const int size = comm.size();
  const int root = static_cast<int>(program.draw(size - 1));
  const DType dtype = program.pick<DType>({DType::u8, DType::i32, DType::f64});
  const auto width = static_cast<std::int64_t>(itemsize(dtype));
  const std::int64_t count = program.size_near(
      program.pick<std::int64_t>({10, kInline / size, near_slot(size), 3 * kChunk}) / width);
  const std::int64_t bytes = count * width;
  const bool in_place = program.draw(3) == 0;
  const int key = static_cast<int>(program.draw(1000));
  std::byte* send = program.memory(bytes * size);
  std::byte* recv = program.memory(bytes);
  const bool is_root = comm.rank() == root;
  if (is_root && in_place) recv = send + root * bytes;
  for (int r = 0; is_root && r < size; ++r) {
    const Bytes part = bytes_of(key + r, bytes);
    if (bytes > 0) std::memcpy(send + r * bytes, part.data(), part.size());
  }
  comm.scatter(is_root ? send : nullptr, recv, dtype, count, root, key);
  program.same(recv, bytes_of(key + comm.rank(), bytes), "scatter");
  for (int r = 0; is_root && r < size; ++r) {
    program.same(send + r * bytes, bytes_of(key + r, bytes), "scatter leaves what it sends");
  }
  program.done("scatter");
}

// Any bits for integers, so that they wrap; halves for floats, whose sums and products are exact.
template <class T>
T element(int key, std::int64_t i) {
  const std::uint64_t mixed =
      (static_cast<std::uint64_t>(i) * 2654435761 + static_cast<std::uint64_t>(key)) *
      0x9e3779b97f4a7c15;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(mixed >> 7);
  return static_cast<T>(static_cast<int>((mixed >> 40) % 17) - 8) / 2;
}

template <class T>
T combined(RedOp op, T a, T b) {
  if (op == RedOp::max) return a < b ? b : a;
  if (op == RedOp::min) return b < a ? b : a;
  if constexpr (std::is_integral_v<T>) {  // their low bits are right whatever overflows
    const auto x = static_cast<std::uint64_t>(a);
    const auto y = static_cast<std::uint64_t>(b);
    if (op == RedOp::prod) return static_cast<T>(x * y);
    if (op == RedOp::band) return static_cast<T>(x & y);
    if (op == RedOp::bor) return static_cast<T>(x | y);
    if (op == RedOp::bxor) return static_cast<T>(x ^ y);
    return static_cast<T>(x + y);
  } else {
    return op == RedOp::prod ? a * b : a + b;
  }
}

// Element i of what `size` ranks reduce to.
template <class T>
T reduced(RedOp op, int key, int size, std::int64_t i) {
  T total = element<T>(key, i);
  for (int r = 1; r < size; ++r) total = combined(op, total, element<T>(key + r, i));
  if (op != RedOp::avg) return total;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(total / size);
  return total * (T{1} / static_cast<T>(size));
}

template <class T>
void reduce_each_way(Program& program, DType dtype) {
  Communicator& comm = program.comm;
  const int size = comm.size();
  std::vector<RedOp> ops{RedOp::sum, RedOp::avg, RedOp::max, RedOp::min, RedOp::prod};
  if (std::is_integral_v<T>) ops.insert(ops.end(), {RedOp::band, RedOp::bor, RedOp::bxor});
  const RedOp op = program.pick(ops);
  const auto item = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t count =
      program.size_near(program.pick<std::int64_t>({10, kInline / size, kInline, kChunk})) / item;
  const int root = static_cast<int>(program.draw(size - 1));
  const bool is_root = comm.rank() == root;
  const bool in_place = program.draw(3) == 0;
  const int key = static_cast<int>(program.draw(1000)) * 8;
  auto* send = reinterpret_cast<T*>(program.memory(count * item));
  auto* recv = reinterpret_cast<T*>(program.memory(count * item));
  if (is_root && in_place) recv = send;
  for (std::int64_t i = 0; i < count; ++i) send[i] = element<T>(key + comm.rank(), i);
  comm.reduce(send, is_root ? recv : nullptr, dtype, count, op, root, key);
  for (std::int64_t i = 0; i < count; ++i) {
    const T own = element<T>(key + comm.rank(), i);
    if (is_root) program.holds(recv[i] == reduced<T>(op, key, size, i), name(op));
    if (send != recv) program.holds(send[i] == own, "reduce leaves what it sends");
    send[i] = own;
  }
  comm.all_reduce(send, dtype, count, op, key);
  for (std::int64_t i = 0; i < count; ++i) {
    program.holds(send[i] == reduced<T>(op, key, size, i), "all_reduce");
    program.holds(!is_root || send[i] == recv[i], "reduce and all_reduce agree");
  }
  const std::int64_t part = count / size;
  for (std::int64_t i = 0; i < part * size; ++i) send[i] = element<T>(key + comm.rank(), i);
  T* mine = recv == send ? send + comm.rank() * part : recv;
  comm.reduce_scatter(send, dtype, mine, {dtype}, part, op, key);
  for (std::int64_t i = 0; i < part; ++i) {
    program.holds(mine[i] == reduced<T>(op, key, size, comm.rank() * part + i), "reduce_scatter");
  }
  program.done("reduce");
}

void reduce(Program& program) {
  switch (program.draw(5)) {
    case 0:
      return reduce_each_way<std::uint8_t>(program, DType::u8);
    case 1:
      return reduce_each_way<std::int8_t>(program, DType::i8);
    case 2:
      return reduce_each_way<std::int32_t>(program, DType::i32);
    case 3:
      return reduce_each_way<std::int64_t>(program, DType::i64);
    case 4:
      return reduce_each_way<float>(program, DType::f32);
    default:
      return reduce_each_way<double>(program, DType::f64);
  }
}

void random_program(Communicator& comm, unsigned seed) {
  Program program(comm, seed);
  for (int step = 0; step < 40; ++step) {
    switch (program.draw(3)) {
      case 0:
        all_to_all(program);
        break;
      case 1:
        gather(program);
        break;
      case 2:
        scatter(program);
        break;
      default:
        reduce(program);
    }
  }
}

// One call after another: who returns may change its operands at once, and who is slow must not see
// that.
void operands_are_free_when_a_call_returns(Communicator& comm) {
  const int size = comm.size();
  for (const std::int64_t count : {3, 6000}) {
    const auto all = static_cast<std::size_t>(count * size);
    std::vector<std::int32_t> send(all), recv(all);
    for (int round = 0; round < 200; ++round) {
      const auto value = [&](int rank) { return round * 10 + rank; };
      const Parts parts(std::vector<std::int64_t>(static_cast<std::size_t>(size), count));
      std::fill(send.begin(), send.end(), value(comm.rank()));
      comm.all_to_all(send.data(), parts, recv.data(), parts, DType::i32);
      for (int r = 0; r < size; ++r) {
        require(recv[static_cast<std::size_t>(count * r)] == value(r) &&
                    recv[static_cast<std::size_t>(count * (r + 1) - 1)] == value(r),
                "what a rank sent when it called");
      }
      const int root = round % size;
      std::fill(send.begin(), send.end(), value(comm.rank()) + 5);
      comm.gather(send.data(), recv.data(), DType::i32, count, root);
      if (comm.rank() == root) require(recv.back() == value(size - 1) + 5, "gathered");
      comm.scatter(send.data(), recv.data(), DType::i32, count, root);
      require(recv[static_cast<std::size_t>(count) - 1] == value(root) + 5, "scattered");
      std::fill(send.begin(), send.end(), value(comm.rank()) + 7);
      comm.reduce(send.data(), recv.data(), DType::i32, count, RedOp::max, root);
      if (comm.rank() == root) require(recv[0] == value(size - 1) + 7, "reduced");
    }
  }
}

// NaN wins from whatever rank it is, and each bit of a product is that of its factors in the order
// of ranks.
template <class T>
void floats_that_are_no_numbers(Communicator& comm, DType dtype) {
  constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const int size = comm.size();
  const int rank = comm.rank();
  const auto ranks = static_cast<std::size_t>(size);
  for (const std::size_t count : {ranks, 1000 + ranks}) {
    for (const RedOp op : {RedOp::min, RedOp::max, RedOp::prod, RedOp::sum}) {
      std::vector<T> buffer(count, T(1) / T(3 + rank));
      buffer[static_cast<std::size_t>(rank)] = kNaN;  // each rank's at another place
      comm.all_reduce(buffer.data(), dtype, static_cast<std::int64_t>(count), op);
      T last = T(1) / T(3);
      for (int r = 1; r < size; ++r) last = combined(op, last, T(1) / T(3 + r));
      for (std::size_t i = 0; i < count; ++i) {
        require(i < ranks ? buffer[i] != buffer[i] : buffer[i] == last, "NaN, where one is");
      }
    }
  }
  T product = rank == 0 ? T(0) : kInfinity;
  comm.all_reduce(&product, dtype, 1, RedOp::prod);
  require(product != product, "zero times infinity is NaN");
  product = rank == 0 ? T(-2) : kInfinity;
  comm.all_reduce(&product, dtype, 1, RedOp::prod);
  require(product == -kInfinity, "less than zero times infinity");
}

void floats(Communicator& comm) {
  floats_that_are_no_numbers<float>(comm, DType::f32);
  floats_that_are_no_numbers<double>(comm, DType::f64);
}

// What rank r has at i: sums of these are rounded otherwise in another order.
float wild(int r, std::int64_t i) {
  const auto drawn = static_cast<std::uint64_t>(r * 1'000'003 + i) * 0x9e3779b97f4a7c15U;
  const float mantissa = static_cast<float>(drawn >> 40) / 16777216.0f - 0.5f;
  return std::ldexp(mantissa, static_cast<int>(drawn >> 20 & 15));
}

float wild_sum(int first, int count, std::int64_t i) {
  if (count == 1) return wild(first, i);
  int lower = 1;
  while (2 * lower < count) lower *= 2;
  return wild_sum(first, lower, i) + wild_sum(first + lower, count - lower, i);
}

// With the call, in shares of a chunk, or where operands are; in place or on a root.
void sums_have_the_same_bits_whichever_way_they_went(Communicator& comm) {
  constexpr std::int64_t kCount = 300'001;  // more than a chunk
  const auto shared = comm.allocate(kCount * sizeof(float), Use::reduce);
  std::vector<float> whole(kCount), pieces(kCount), send(kCount), recv(kCount);
  auto* in_window = static_cast<float*>(shared->data());
  for (std::int64_t i = 0; i < kCount; ++i) {
    const auto at = static_cast<std::size_t>(i);
    whole[at] = pieces[at] = send[at] = in_window[i] = wild(comm.rank(), i);
  }
  const auto sum = [&](float* data, std::int64_t count) {
    comm.all_reduce(data, DType::f32, count, RedOp::sum);
  };
  sum(whole.data(), kCount);
  sum(in_window, kCount);
  constexpr std::int64_t kMost = 5000;  // in shares of one chunk, with the call, beside the call
  for (std::int64_t done = 0, n = kMost; done < kCount; done += n, n = (n * 7 + 11) % kMost + 1) {
    n = std::min(n, kCount - done);
    sum(pieces.data() + done, n);
  }
  comm.reduce(send.data(), recv.data(), DType::f32, kCount, RedOp::sum, 0);
  for (std::int64_t i = 0; i < kCount; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const float wanted = wild_sum(0, comm.size(), i);
    require(whole[at] == wanted && in_window[i] == wanted, "a large sum is a tree");
    require(pieces[at] == wanted, "and so is a small one");
    require(comm.rank() > 0 || recv[at] == wanted, "and one on a root");
  }
}

// The way of this rank's latest call.
std::string way_of(const Communicator& comm, const char* operation) {
  for (const auto& receipt : comm.receipts()) {
    if (receipt.operation == operation) return receipt.taken;
  }
  return "none";
}

// Up to 16 KiB of all ranks go with the call, and more from where they are, if the others reach
// that: threads always, and processes in communication memory.
void receipts_tell_the_way(Communicator& comm) {
  const bool threads = comm.transport() == "local";
  const int size = comm.size();
  const auto own = comm.allocate(std::size_t{1} << 20, Use::reduce);
  const auto expect = [&](const char* operation, const std::string& way) {
    const std::string taken = way_of(comm, operation);
    require(taken == way, std::string(operation) + " goes " + taken + ", not " + way);
  };
  for (const std::int64_t more : {0, 1, 100'000}) {
    for (const bool in_memory : {false, true}) {
      const std::int64_t bytes = kInline / size + more;  // of a rank
      Bytes send(static_cast<std::size_t>(kInline + bytes * size)), recv(send.size());
      void* from = in_memory ? own->data() : send.data();
      const std::string way = more == 0 ? "inline" : in_memory || threads ? "direct" : "staged";
      const Parts parts(bytes / size + (more == 1 ? 1 : 0));
      comm.all_to_all(from, parts, recv.data(), parts, DType::u8);
      expect("all_to_all", way);
      comm.gather(from, recv.data(), DType::u8, bytes, 0);
      expect("gather", way);
      comm.scatter(from, recv.data(), DType::u8, bytes, size - 1);
      expect("scatter", way);
      comm.reduce(from, recv.data(), DType::u8, kInline + more, RedOp::bor, 0);
      expect("reduce", way);
    }
  }
}

// What nobody reads does not keep the others from reading where the elements are: of a rank that
// sends nothing, and of the root.
void operands_that_nobody_reads_may_be_anywhere(Communicator& comm) {
  const int size = comm.size();
  const auto own = comm.allocate(std::size_t{1} << 20, Use::reduce);
  const std::int64_t bytes = 100'000;
  Bytes memory(static_cast<std::size_t>(bytes * size)), recv(memory.size());
  const bool is_first = comm.rank() == 0;
  void* from = is_first ? static_cast<void*>(memory.data()) : own->data();
  const Parts sent(is_first ? 0 : bytes);
  std::vector<std::int64_t> received(static_cast<std::size_t>(size), bytes);
  received[0] = 0;
  comm.all_to_all(is_first ? nullptr : from, sent, recv.data(), Parts(received), DType::u8);
  require(way_of(comm, "all_to_all") == "direct", "a rank that sends nothing");
  comm.gather(from, recv.data(), DType::u8, bytes, 0);
  require(way_of(comm, "gather") == "direct", "the root of a gather");
  comm.reduce(from, recv.data(), DType::u8, bytes, RedOp::bor, 0);
  require(way_of(comm, "reduce") == "direct", "the root of a reduce");
}

}  // namespace

int main(int argc, char** argv) {
  alarm(280);  // a hang is a failure
  const auto seed = static_cast<unsigned>(argc > 1 ? std::stoul(argv[1]) : 1);
  std::printf("seed %u\n", seed);
  std::fflush(stdout);  // the children have a copy of what is not written yet
  const auto programs = [seed](unsigned more) {
    return [=](Communicator& comm) { random_program(comm, seed * 100 + more); };
  };
  // Before there are threads.
  for (int size = 1; size <= 5; ++size) on_processes(size, programs(static_cast<unsigned>(size)));
  on_processes(3, operands_are_free_when_a_call_returns);
  on_processes(2, floats);
  for (const int size : {2, 5}) on_processes(size, sums_have_the_same_bits_whichever_way_they_went);
  on_processes(3, receipts_tell_the_way);
  on_processes(3, operands_that_nobody_reads_may_be_anywhere);
  for (int size = 1; size <= 5; ++size) {
    on_threads(size, programs(10 + static_cast<unsigned>(size)));
  }
  on_threads(3, operands_are_free_when_a_call_returns);
  on_threads(3, floats);
  for (const int size : {2, 5}) on_threads(size, sums_have_the_same_bits_whichever_way_they_went);
  on_threads(3, receipts_tell_the_way);
  on_threads(3, operands_that_nobody_reads_may_be_anywhere);
  std::puts("ok");
}
