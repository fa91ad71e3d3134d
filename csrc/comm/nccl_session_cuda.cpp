#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl_session.h"
#include "stream/wait_check.h"

namespace shardcomm {
namespace {

constexpr std::size_t kWordBytes = 128;  // apart, as they are used at once

Call attach() {
  Call call;
  call.op = Op::attach;
  return call;
}

}  // namespace

NcclSession::NcclSession(const nccl::Library& nccl, int rank, int size, int device,
                         double deadline_s)
    : rank(nccl, rank, size, device, deadline_s), words_(device, 4 * kWordBytes) {
  for (auto& stream : streams_) stream = make_cuda_stream(device);
  check_cuda(cudaMemset(words_.data(), 0, words_.bytes()), "cudaMemset");
}

void* NcclSession::word(const NcclChannel& channel) const {
  return static_cast<std::byte*>(words_.data()) + (&channel == &gathers ? 0 : kWordBytes);
}

cudaStream_t NcclSession::set_up(const NcclChannel& channel) const {
  return static_cast<cudaStream_t>(streams_[&channel == &gathers ? 0 : 1]->native());
}

bool NcclSession::agree(NcclChannel& channel, const Call& call, bool mine) {
  void* word = static_cast<std::byte*>(this->word(channel)) + 2 * kWordBytes;
  cudaStream_t stream = set_up(channel);
  check_cuda(cudaMemsetAsync(word, mine ? 1 : 0, 1, stream), "cudaMemsetAsync");
  channel.call(call, [&](nccl::Comm comm) {
    return rank.nccl.all_reduce(word, word, 1, nccl::kUint8, nccl::kMin, comm, stream);
  });
  wait(*streams_[&channel == &gathers ? 0 : 1]->record(), call);
  unsigned char all = 0;
  check_cuda(cudaMemcpyAsync(&all, word, 1, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return all != 0;
}

void NcclSession::wait(const Event& event, const Call& call) {
  Patience patience(rank.deadline);
  try {
    while (!event.query()) {
      rank.check();
      if (!patience.pause()) rank.fail(rank.late(call));
    }
  } catch (...) {
    rank.fail(describe(call) + " was interrupted");
    throw;
  }
  rank.check();
}

void NcclSession::connect(const std::string& unique_id) {
  const nccl::Library& nccl = rank.nccl;
  nccl::UniqueId id;
  std::memcpy(id.bytes, unique_id.data(), sizeof(id.bytes));
  nccl::Config config;
  gathers.call(attach(), [&](nccl::Comm) {
    return nccl.comm_init_rank_config(&gathers.comm, rank.size, id, rank.rank, &config);
  });
  // Until a split is done, it is the parent that is in progress; its communicator is there, and may
  // be, afterwards.
  gathers.call(attach(), [&](nccl::Comm comm) {
    return nccl.comm_split(comm, 0, rank.rank, &reduces.comm, &config);
  });
  reduces.call(attach(), [](nccl::Comm) { return nccl::kInProgress; });
}

namespace {

// A split of somebody else's communicator, which may be a blocking one: on a thread of its own,
// that is left behind, with what it writes to, if the other ranks never come.
struct Split {
  nccl::Config config;
  nccl::Comm child = nullptr;
  nccl::Result result = nccl::kSuccess;
  std::atomic<bool> done{false};

  // Who has abandoned it may end the parent.
  void abandon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    abandoned_ = true;
  }
  // False once abandoned.
  bool poll(const nccl::Library& nccl, nccl::Comm parent) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (abandoned_) return false;
    const nccl::Result asked = nccl.comm_get_async_error(parent, &result);
    if (asked != nccl::kSuccess) result = asked;
    return true;
  }

 private:
  std::mutex mutex_;
  bool abandoned_ = false;
};

// For good: NCCL may write to it until the parent ends.
void keep(const std::shared_ptr<Split>& split) {
  static std::mutex mutex;
  static auto& kept = *std::make_unique<std::vector<std::shared_ptr<Split>>>().release();
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(split);
}

void run_split(const nccl::Library& nccl, int device, nccl::Comm parent, int key,
               const std::shared_ptr<Split>& split) {
  cudaSetDevice(device);
  split->result = nccl.comm_split(parent, 0, key, &split->child, &split->config);
  while (split->result == nccl::kInProgress) {
    if (!split->poll(nccl, parent)) {
      keep(split);
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  split->done.store(true);
}

}  // namespace

void NcclSession::split(nccl::Comm borrowed) {
  for (NcclChannel* channel : {&gathers, &reduces}) {
    const auto split = std::make_shared<Split>();
    std::thread([&nccl = rank.nccl, device = rank.device, key = rank.rank, borrowed, split] {
      run_split(nccl, device, borrowed, key, split);
    }).detach();
    Patience patience(rank.deadline);
    try {
      while (!split->done.load()) {
        if (!patience.pause()) rank.fail(rank.late(attach()));
        rank.check();
      }
    } catch (...) {
      split->abandon();
      throw;
    }
    if (split->result != nccl::kSuccess) {
      rank.fail(rank.refused(attach(), split->result, borrowed));
      rank.check();
    }
    channel->comm = split->child;
    channel->call(attach(), [](nccl::Comm) { return nccl::kInProgress; });
  }
}

bool NcclSession::finalize() noexcept {
  const std::scoped_lock lock(gathers.mutex, reduces.mutex);
  if (gathers.settling || reduces.settling) return false;
  try {
    const DeviceScope scope(rank.device);
    const nccl::Library& nccl = rank.nccl;
    for (NcclChannel* channel : {&gathers, &reduces}) {
      channel->deregister_all();
      const nccl::Result result = nccl.comm_finalize(channel->comm);
      if (result != nccl::kSuccess && result != nccl::kInProgress) return false;
    }
    Patience patience(rank.deadline);
    for (NcclChannel* channel : {&gathers, &reduces}) {
      nccl::Result state = nccl::kInProgress;
      while (state == nccl::kInProgress) {
        if (nccl.comm_get_async_error(channel->comm, &state) != nccl::kSuccess) return false;
        if (state == nccl::kInProgress && !patience.pause()) return false;
      }
      if (state != nccl::kSuccess) return false;
    }
    for (NcclChannel* channel : {&gathers, &reduces}) {
      nccl.comm_destroy(std::exchange(channel->comm, nullptr));
    }
    return true;
  } catch (...) {  // interrupted, or the driver has gone before
    return false;
  }
}

}  // namespace shardcomm
