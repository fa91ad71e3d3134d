#include <utility>

#include "comm/nccl_communicator.h"
#include "comm/nccl_memory.h"

namespace shardcomm {
NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclSession> session)
    : session_(std::move(session)),
      rank_(session_->rank),
      nccl_(rank_.nccl),
      scratch_(rank_.device),
      watchdog_([session = session_] { session->watchdog.run(); }) {}

NcclCommunicator::~NcclCommunicator() { close(); }

void NcclCommunicator::skip(NcclChannel& channel, Call& call, const Path& path) {
  const Turn turn(channel.busy);
  rank_.check();
  call.sequence = ++channel.sequence;
  took(call, path.requested, path.taken, path.reason);
}

std::shared_ptr<Memory> NcclCommunicator::allocate(std::size_t bytes, Use use) {
  NcclChannel& channel = session_->channel(use);
  const Turn turn(channel.busy);
  rank_.check();
  const DeviceScope scope(rank_.device);
  Call call;
  call.op = Op::allocate;
  call.root = static_cast<std::int32_t>(use);
  call.count = static_cast<std::int64_t>(bytes);
  call.sequence = ++channel.sequence;
  try {
    NcclAllocation allocation = allocate_nccl(session_, channel, call, bytes);
    took(call, "window", allocation.taken, allocation.reason);
    return std::move(allocation.memory);
  } catch (...) {
    rank_.fail(describe(call) + " was interrupted");
    session_->watchdog.wake();
    throw;
  }
}

void NcclCommunicator::abort(const std::string& reason) noexcept {
  if (closed_.load()) return;
  try {
    rank_.fail("aborted: " + reason);
  } catch (...) {  // no memory for the text
    rank_.fail("aborted");
  }
  session_->watchdog.wake();
}

void NcclCommunicator::close() noexcept {
  if (closed_.exchange(true)) return;
  NcclWatchdog& watchdog = session_->watchdog;
  rank_.close();
  if (!watchdog.drain_all()) rank_.fail("closed while collectives were under way");
  if (rank_.failed()) {
    watchdog.wake();
  } else {
    watchdog.stop();
  }
  // What it does ends by itself, unless NCCL or the device hang: then it is left behind, with all
  // that it holds.
  if (watchdog.wait_for_end(rank_.deadline)) {
    watchdog_.join();
  } else {
    watchdog_.detach();
  }
  if (!rank_.failed() && !session_->finalize()) watchdog.abort_all();
}

std::vector<Receipt> NcclCommunicator::receipts() const {
  const std::lock_guard<std::mutex> lock(receipts_mutex_);
  std::vector<Receipt> all;
  for (const Receipt& receipt : receipts_) {
    if (!receipt.operation.empty()) all.push_back(receipt);
  }
  return all;
}

// A steady state assigns what is there already: no allocation.
void NcclCommunicator::took(const Call& call, const char* requested, const char* taken,
                            std::string_view reason) {
  const std::lock_guard<std::mutex> lock(receipts_mutex_);
  Receipt& receipt = receipts_[static_cast<std::size_t>(call.op)];
  receipt.operation = name(call.op);
  receipt.sequence = call.sequence;
  receipt.requested = requested;
  receipt.taken = taken;
  receipt.reason = reason;
}

}  // namespace shardcomm
