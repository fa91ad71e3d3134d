#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "comm/nccl_channel.h"
#include "stream/wait_check.h"

namespace shardcomm {

using nccl::kInProgress;
using nccl::kSuccess;

void NcclRank::fail(const std::string& text) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load()) return;
  try {
    failure_ = name() + ": " + text;
  } catch (...) {  // no memory for the text: failed without one
  }
  failed_.store(true, std::memory_order_release);
}

void NcclRank::check() const {
  if (failed()) throw CommError(failure_);
  if (closed_.load()) throw CommError(name() + " has closed the communicator");
}

std::string NcclRank::name() const {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

std::string NcclRank::late(const Call& call) const {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g s", deadline.count());
  return describe(call) + " did not complete in " + seconds +
         ": another rank died, is late, or called something else";
}

std::string NcclRank::refused(const Call& call, nccl::Result result, nccl::Comm comm) const {
  std::string text = describe(call) + ": NCCL: " + nccl.get_error_string(result);
  const char* last = nccl.get_last_error(comm);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text;
}

// The caller holds the mutex. Waits until NCCL is done with its last call.
nccl::Result NcclChannel::settle(const Call& described, nccl::Result result,
                                 std::unique_lock<std::mutex>& lock) {
  if (result != kInProgress) return result;
  Patience patience(rank_.deadline);
  // Whoever leaves this loop early has failed, and `comm` may be gone by then.
  while (!rank_.ended()) {
    nccl::Result state = kInProgress;
    const nccl::Result asked = rank_.nccl.comm_get_async_error(comm, &state);
    if (asked != kSuccess) return asked;
    if (state != kInProgress) return state;
    settling = true;
    lock.unlock();
    try {
      if (!patience.pause()) rank_.fail(rank_.late(described));
    } catch (...) {
      rank_.fail(describe(described) + " was interrupted");
      throw;  // and settling it stays: half done
    }
    lock.lock();
    settling = false;
  }
  rank_.fail(describe(described) + " was under way when the communicator was closed");
  rank_.check();
  return result;
}

void NcclChannel::refuse(const Call& described, nccl::Result result) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    rank_.fail(rank_.refused(described, result, comm));
  }
  rank_.check();
  throw CommError(rank_.refused(described, result, nullptr));
}

std::shared_ptr<Registration> NcclChannel::keep(Registration registration) {
  const std::lock_guard<std::mutex> lock(registrations_mutex_);
  return *registrations_.insert(std::make_shared<Registration>(std::move(registration))).first;
}

void NcclChannel::let_go(std::shared_ptr<Registration> registration) noexcept {
  {
    const std::lock_guard<std::mutex> lock(registrations_mutex_);
    unwanted_.push_back(std::move(registration));
    has_unwanted_.store(true);
  }
  Registrations gone;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!settling) gone = deregister_unwanted();  // else with the next call
}

NcclChannel::Registrations NcclChannel::deregister_unwanted() {
  const std::lock_guard<std::mutex> lock(registrations_mutex_);
  for (const auto& registration : unwanted_) {
    deregister(*registration);
    registrations_.erase(registration);
  }
  has_unwanted_.store(false);
  return std::exchange(unwanted_, {});
}

void NcclChannel::deregister_all() {
  const std::lock_guard<std::mutex> lock(registrations_mutex_);
  for (const auto& registration : registrations_) deregister(*registration);
  registrations_.clear();
}

// Local, and done when it returns. What an aborted communicator has registered, it has freed
// itself.
void NcclChannel::deregister(Registration& registration) {
  const bool alive = comm != nullptr && !rank_.failed();
  if (nccl::Window window = std::exchange(registration.window, nullptr); window && alive) {
    rank_.nccl.comm_window_deregister(comm, window);
  }
  if (void* buffer = std::exchange(registration.buffer, nullptr); buffer && alive) {
    rank_.nccl.comm_deregister(comm, buffer);
  }
}

Patience::Clock::duration Patience::to_ticks(std::chrono::duration<double> time) {
  constexpr std::chrono::duration<double> kLongest = std::chrono::hours(24 * 365);
  return std::chrono::duration_cast<Clock::duration>(std::min(time, kLongest));
}

bool Patience::pause() {
  const Clock::time_point now = Clock::now();
  if (now >= end_) return false;
  if (now - checked_ >= kWaitSlice) {
    checked_ = now;
    check_wait();
  }
  // What is done at once takes NCCL some ten microseconds; what is not waits for another rank.
  const auto waited = now - begin_;
  if (waited < std::chrono::microseconds(200)) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::clamp<Clock::duration>(
        waited / 8, std::chrono::microseconds(50), std::chrono::milliseconds(1)));
  }
  return true;
}

}  // namespace shardcomm
