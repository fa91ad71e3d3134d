// Ranks of the NCCL transport as threads of a test, over a CUDA runtime and an NCCL that this
// process plays: see fake_cuda.h and fake_nccl.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"
#include "fake_nccl.h"
#include "shardcomm/nccl.h"

namespace shardcomm::test {

using Clock = std::chrono::steady_clock;
using Comm = std::shared_ptr<Communicator>;

// Ends the process unless `holds`.
void require(bool holds, const std::string& claim);
void require_text(const std::string& text, const std::string& part);
double seconds_since(Clock::time_point begin);
// What `call` throws as a CommError, which it must.
std::string comm_error(const std::function<void()>& call);

std::uint16_t bf16_of(float value);  // of a value that bf16 has
Receipt receipt(const Comm& comm, const std::string& operation);

// A rank's stream, with the host waiting for it.
class Queue {
 public:
  explicit Queue(const Comm& comm) : stream_(make_cuda_stream(comm->rank())) {}
  NativeStream get() const { return stream_->native(); }
  cudaStream_t cuda() const { return static_cast<cudaStream_t>(get()); }
  void finish() const { cudaStreamSynchronize(cuda()); }
  Stream& stream() { return *stream_; }

 private:
  std::unique_ptr<Stream> stream_;
};

// The NCCL that is played: loaded from `path`, which nccl_status then takes.
void load(const char* path);
int version();
FakeNcclCounts counts();
void set(const FakeNccl& fake);
std::uint64_t bytes_sent(int from, int to);
void async_error(int rank, int result);

// Where threads wait for each other, once.
class Latch {
 public:
  explicit Latch(int threads) : missing_(threads) {}
  void arrive_and_wait() {
    for (--missing_; missing_ > 0;) std::this_thread::yield();
  }

 private:
  std::atomic<int> missing_;
};

// body(rank) in a thread each, with device `rank` current.
void in_threads(int ranks, const std::function<void(int)>& body);

struct Setting {
  int ranks = 3;
  double deadline_s = 20;
  CtaPolicy cta_policy = CtaPolicy::standard;
  FakeNccl fake = {};                              // while the ranks connect
  FakeNccl connected = {};                         // afterwards
  std::function<std::string(int rank)> host = {};  // default: all on one
};

// body(comm) on connected ranks; afterwards no communicator is left, and none was misused.
void on_ranks(const char* name, const Setting& setting, const std::function<void(Comm)>& body);
void require_nothing_left();

}  // namespace shardcomm::test
