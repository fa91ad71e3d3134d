// Ranks that are as far out of step as the protocol lets them be: one rank lags, and does each of
// its reads and writes only when all others have come to a meeting that it has not come to. A
// meeting too few is then wrong every time, and not once in a thousand.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/board_communicator.h"
#include "comm/executor.h"
#include "shardcomm/communicator.h"

namespace lagging {

using shardcomm::BoardCommunicator;
using shardcomm::BoardMemory;
using shardcomm::Communicator;
using shardcomm::ControlMemory;
using shardcomm::DType;
using shardcomm::Epilogue;
using shardcomm::Executor;
using shardcomm::Mapping;
using shardcomm::NativeStream;
using shardcomm::RedOp;

constexpr double kDeadlineS = 20.0;

inline void require(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim.c_str());
  std::exit(1);
}

// Memory of one process, which peers find by its handle only, or also by any address.
class Provider final : public shardcomm::WindowProvider {
 public:
  Provider(bool shares_addresses, std::function<void()> before_open)
      : shares_addresses_(shares_addresses), before_open_(std::move(before_open)) {}
  std::shared_ptr<void> create(std::size_t bytes, std::uint64_t* handle) override {
    auto made = std::make_shared<std::shared_ptr<Mapping>>(Mapping::anonymous(bytes));
    *handle = reinterpret_cast<std::uint64_t>(made.get());
    return made;
  }
  std::shared_ptr<Mapping> open(std::uint64_t handle, std::size_t) override {
    before_open_();
    return *reinterpret_cast<const std::shared_ptr<Mapping>*>(handle);
  }
  bool shares_addresses() const override { return shares_addresses_; }

 private:
  bool shares_addresses_;
  std::function<void()> before_open_;
};

struct Group {
  Group(int ranks, bool shares) : size(ranks), shares_addresses(shares) {}
  int size;
  bool shares_addresses;
  std::shared_ptr<Mapping> control = Mapping::anonymous(ControlMemory::bytes(size));

  // Returns when all other ranks have come to the next meeting of the channel, or one has failed.
  void let_others_come_first(int rank, int channel) const {
    BoardMemory& board =
        *ControlMemory::boards(control->data(), size)[static_cast<std::size_t>(channel)];
    const auto has_come = [&](int r) {
      return board.ranks[r].came_to() > board.ranks[rank].came_to();
    };
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(kDeadlineS);
    for (int r = 0; r < size; ++r) {
      while (r != rank && !has_come(r)) {
        require(std::chrono::steady_clock::now() < end, "the others come");
        std::this_thread::yield();
      }
    }
  }
};

// As on a host, but late.
class Lagging final : public Executor {
 public:
  Lagging(const Group& group, int rank, bool late) : lags(late), group_(group), rank_(rank) {}
  bool on_host() const override { return true; }
  void copy(void* dst, const void* src, std::size_t bytes, NativeStream stream) override {
    lag();
    host_->copy(dst, src, bytes, stream);
  }
  void fill(shardcomm::Filler& filler, void* dst, const void* src, std::size_t bytes,
            NativeStream stream) override {
    lag();
    host_->fill(filler, dst, src, bytes, stream);
  }
  void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
               NativeStream stream) override {
    lag();
    host_->convert(dst, dst_dtype, src, src_dtype, count, stream);
  }
  void check_reduction(DType dtype, RedOp op) const override { host_->check_reduction(dtype, op); }
  void reduce(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
              DType dtype, RedOp op, std::int64_t count, NativeStream stream) override {
    lag();
    host_->reduce(dst, epilogue, sources, num_sources, dtype, op, count, stream);
  }
  void before_meeting(int, std::uint64_t, NativeStream) override {}
  void after_meeting(int, std::uint64_t, NativeStream) override {}
  void finish() noexcept override {}

  int channel = 0;  // of the calls under way
  int allocates_on = 0;
  bool lags;

 private:
  void lag() const {
    if (lags) group_.let_others_come_first(rank_, channel);
  }
  const Group& group_;
  int rank_;
  std::unique_ptr<Executor> host_ = shardcomm::make_host_executor();
};

// One rank, and what it sends: known to all, so that each checks its own result.
struct Rank {
  static constexpr std::int64_t kMost = 1'300'000;  // values of a rank
  Communicator& comm;
  Lagging& executor;
  const Group& group;

  static float value(int rank, std::int64_t i) {
    return static_cast<float>((i + 8 * rank) * 11 % 17 - 8);
  }
  // Copied, since a sanitizer looks once at a copy, and else at each element.
  std::vector<float> values(std::int64_t count) const {
    static const std::vector<float> of_rank_0 = [] {
      std::vector<float> made(kMost);
      for (std::int64_t i = 0; i < kMost; ++i) made[static_cast<std::size_t>(i)] = value(0, i);
      return made;
    }();
    require(8 * comm.rank() + count <= kMost, "so many values are there");
    const auto first = of_rank_0.begin() + 8 * comm.rank();
    return {first, first + count};
  }
  // Whoever lags still reads what it has while the others call the next collective already.
  void look_late(int channel) const {
    if (executor.lags) group.let_others_come_first(comm.rank(), channel);
  }
  float sum(std::int64_t i) const {
    float total = 0;
    for (int r = 0; r < comm.size(); ++r) total += value(r, i);
    return total;
  }
};

using Body = std::function<void(Rank&)>;

inline void with_each_rank_lagging(int size, bool shares_addresses, const Body& body) {
  for (int late = 0; late < size; ++late) {
    const Group group(size, shares_addresses);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        auto executor = std::make_unique<Lagging>(group, rank, rank == late);
        Lagging& lagging = *executor;
        const auto open_late = [&lagging, &group, rank] {
          if (lagging.lags) group.let_others_come_first(rank, lagging.allocates_on);
        };
        BoardCommunicator own("lagging", rank, size, {kDeadlineS}, group.control,
                              std::make_unique<Provider>(shares_addresses, open_late),
                              std::move(executor), [](int) { return false; });
        Communicator& comm = own;
        Rank here{comm, lagging, group};
        body(here);
        lagging.lags = false;
        // In its last operation the late rank has waited for the others to come here.
        float none = 0;
        if (lagging.channel == 0) comm.barrier();
        if (lagging.channel == 1) comm.all_reduce(&none, DType::f32, 1, RedOp::sum);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace lagging
