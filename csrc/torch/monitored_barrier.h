// A barrier that says which ranks have not come.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "deadline.h"
#include "messages.h"
#include "shardcomm.hpp"
#include "signals.h"

namespace shardcomm_torch {

// Rank 0 hears of each rank that has come, and then tells each rank whether all have. A rank that
// does not come within `timeout` harms only this barrier. Its messages have tags that no program's
// messages have.
class MonitoredBarrier {
 public:
  MonitoredBarrier(shc_comm* comm, int rank, int size, std::int64_t number,
                   std::chrono::milliseconds timeout)
      : comm_(comm),
        rank_(rank),
        size_(size),
        tag_((std::int64_t{1} << 40) + number),
        timeout_(timeout),
        until_(time_after(timeout)) {}

  // `wait_all`: rank 0 names all ranks that have not come, and not only the first.
  void run(bool wait_all) const {
    if (rank_ == 0) {
      hear_of_all(wait_all);
    } else {
      tell(0, 1);
      std::uint8_t all_came = 0;
      if (!hear(0, &all_came) || all_came == 0) {
        throw std::runtime_error(
            "Rank " + std::to_string(rank_) +
            " successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0; the error of rank 0 names the ranks that have not come");
      }
    }
  }

 private:
  void hear_of_all(bool wait_all) const {
    std::vector<int> missing;
    for (int r = 1; r < size_ && (wait_all || missing.empty()); ++r) {
      std::uint8_t came = 0;
      if (!hear(r, &came)) missing.push_back(r);
    }
    for (int r = 1; r < size_; ++r) tell(r, missing.empty() ? 1 : 0);
    if (missing.empty()) return;
    const std::string after = std::to_string(timeout_.count()) + " ms";
    if (timeout_.count() == 0) {
      throw std::runtime_error("Rank 0 timed out in monitoredBarrier after " + after);
    }
    std::string ranks = missing.size() > 1 ? "Ranks " : "Rank ";
    for (std::size_t i = 0; i < missing.size(); ++i) {
      ranks += (i > 0 ? ", " : "") + std::to_string(missing[i]);
    }
    throw std::runtime_error(ranks + " failed to pass monitoredBarrier in " + after);
  }

  // A byte is on its way at once, unless `rank` has taken none of many messages before it. A rank
  // that is not told in time does not pass.
  void tell(int rank, std::uint8_t value) const {
    has_ended(Message::Request(shc::made<shc_request>(
        [&](auto* made) { return shc_isend(comm_, &value, 1, rank, tag_, made); })));
  }

  // Whether a byte has come from `rank` in time.
  bool hear(int rank, std::uint8_t* value) const {
    return has_ended(Message::Request(shc::made<shc_request>(
        [&](auto* made) { return shc_irecv(comm_, value, 1, rank, tag_, made); })));
  }

  // Whether it has in time.
  bool has_ended(const Message::Request& request) const {
    const std::chrono::duration<double> left = until_ - std::chrono::steady_clock::now();
    shc_status status = SHC_OK;
    interruptibly([&] {
      status = shc_request_wait(request.get(), left.count() > 0 ? left.count() : 0);
      if (status == SHC_INTERRUPTED) throw shc::Error::last();
    });
    if (status != SHC_NOT_READY) shc::check(status);
    return status == SHC_OK;
  }

  shc_comm* const comm_;
  const int rank_;
  const int size_;
  const std::int64_t tag_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point until_;
};

}  // namespace shardcomm_torch
