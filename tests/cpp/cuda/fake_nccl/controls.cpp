// What tests set and ask.
#include <cstdlib>

#include "fake_nccl/comm.h"

namespace fake_nccl {
namespace {

std::atomic<bool>& is_instant() {
  static std::atomic<bool> instant = [] {
    const char* asked = std::getenv("FAKE_NCCL_INSTANT");
    return asked != nullptr && std::string(asked) == "1";
  }();
  return instant;
}

}  // namespace

// Never destroyed: streams may still run kernels when the process ends.
Controls& controls() {
  static Controls& instance = *std::make_unique<Controls>().release();
  return instance;
}

FakeNccl faults() {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  return controls().faults;
}

void count(int FakeNcclCounts::* counter, int by) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().counts.*counter += by;
}

void sent(int from, int to, unsigned long long bytes) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().bytes[{from, to}] += bytes;
}

bool instant() { return is_instant().load(std::memory_order_relaxed); }

bool hits(int faulty, int rank) { return faulty == rank || faulty == FakeNccl::kEveryRank; }

Result fault_of(FakeCall call, int rank) {
  const FakeNccl set = faults();
  return set.fails == call && hits(set.fails_on, rank) ? static_cast<Result>(set.fails_with)
                                                       : success;
}

}  // namespace fake_nccl

using fake_nccl::controls;

extern "C" {

void fake_nccl_set(const FakeNccl* faults) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().faults = *faults;
}

void fake_nccl_get(FakeNcclCounts* counts) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  *counts = controls().counts;
  counts->live = 0;
  counts->hosts_waiting = controls().hosts_waiting;
  counts->kernels_waiting = controls().kernels_waiting;
  for (const auto& comm : controls().comms) counts->live += comm->ended ? 0 : 1;
}

void fake_nccl_reset() {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().counts = {};
  controls().bytes.clear();
}

void fake_nccl_async_error(int rank, int result) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  for (const auto& comm : controls().comms) {
    if (comm->rank == rank && !comm->ended) comm->proxy_error = result;
  }
}

unsigned long long fake_nccl_bytes(int from, int to) {
  const std::lock_guard<std::mutex> lock(controls().mutex);
  const auto found = controls().bytes.find({from, to});
  return found == controls().bytes.end() ? 0 : found->second;
}

void fake_nccl_instant(int instant) { fake_nccl::is_instant() = instant != 0; }

}  // extern "C"
