#include <algorithm>
#include <utility>

#include "comm/nccl_memory.h"

namespace shardcomm {
namespace {

class NcclMemory final : public Memory {
 public:
  NcclMemory(std::shared_ptr<NcclSession> session, NcclChannel& channel,
             std::shared_ptr<Registration> registration, std::size_t bytes)
      : session_(std::move(session)),
        channel_(channel),
        registration_(std::move(registration)),
        data_(registration_->memory.get()),
        bytes_(bytes) {}
  ~NcclMemory() override {
    try {
      // What is queued may use it still. A failed communicator's work ends, as it is aborted.
      const DeviceScope scope(device());
      cudaDeviceSynchronize();
    } catch (const CudaError&) {  // the process ends and the driver has gone before
    }
    channel_.let_go(std::move(registration_));
  }
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  void* data() const override { return data_; }
  std::size_t bytes() const override { return bytes_; }
  int device() const override { return session_->rank.device; }

 private:
  std::shared_ptr<NcclSession> session_;
  NcclChannel& channel_;
  std::shared_ptr<Registration> registration_;
  void* data_;
  std::size_t bytes_;
};

// NCCL's own allocator, where it has one: only that memory can be registered in every way.
std::shared_ptr<void> take(const NcclRank& rank, std::size_t bytes) {
  const nccl::Library& nccl = rank.nccl;
  if (nccl.mem_alloc == nullptr || nccl.mem_free == nullptr) {
    const auto memory = std::make_shared<DeviceMemory>(rank.device, bytes);
    return {memory, memory->data()};
  }
  void* data = nullptr;
  const nccl::Result result = nccl.mem_alloc(&data, bytes);
  if (result != nccl::kSuccess) {
    throw CudaError(std::string("ncclMemAlloc: ") + nccl.get_error_string(result));
  }
  return {data, [&nccl, device = rank.device](void* freed) {
            try {
              const DeviceScope scope(device);
              nccl.mem_free(freed);
            } catch (const CudaError&) {  // as above
            }
          }};
}

// Null where this NCCL or this system has no windows; then `reason` says which.
nccl::Window register_window(NcclSession& session, NcclChannel& channel, const Call& call,
                             void* data, std::size_t bytes, std::string& reason) {
  const nccl::Library& nccl = session.rank.nccl;
  if (nccl.comm_window_register == nullptr || nccl.comm_window_deregister == nullptr) {
    reason = "nccl: window registration needs NCCL " + nccl::version_text(nccl::kWindowSince) +
             ", this is " + nccl::version_text(nccl.version);
    return nullptr;
  }
  // NCCL says success and gives no window where the ranks do not reach each other's memory. An
  // error of this call alone is no more than that; one that stays with the communicator is its end.
  channel.window = nullptr;
  const nccl::Result result = channel.attempt(call, [&](nccl::Comm comm) {
    return nccl.comm_window_register(comm, data, bytes, &channel.window, nccl::kWindowSymmetric);
  });
  if (result != nccl::kSuccess) {
    reason = std::string("nccl: window registration failed: ") + nccl.get_error_string(result);
    channel.call(call, [&](nccl::Comm comm) {
      nccl::Result state = nccl::kSuccess;
      const nccl::Result asked = nccl.comm_get_async_error(comm, &state);
      return asked == nccl::kSuccess ? state : asked;
    });
  }
  nccl::Window window = std::exchange(channel.window, nullptr);
  if (session.agree(channel, call, window != nullptr)) return window;
  if (reason.empty()) {
    reason = "nccl: the ranks of this system cannot all reach each other's memory";
  }
  if (window != nullptr) {
    channel.call(call, [&](nccl::Comm comm) { return nccl.comm_window_deregister(comm, window); });
  }
  return nullptr;
}

void* register_buffer(NcclSession& session, NcclChannel& channel, const Call& call, void* data,
                      std::size_t bytes, std::string& reason) {
  const nccl::Library& nccl = session.rank.nccl;
  if (nccl.comm_register == nullptr || nccl.comm_deregister == nullptr) {
    reason += "; buffer registration needs NCCL " + nccl::version_text(nccl::kBufferSince);
    return nullptr;
  }
  void* handle = nullptr;
  channel.call(call,
               [&](nccl::Comm comm) { return nccl.comm_register(comm, data, bytes, &handle); });
  if (handle == nullptr) reason += "; buffer registration is switched off (NCCL_LOCAL_REGISTER)";
  return handle;
}

}  // namespace

NcclAllocation allocate_nccl(const std::shared_ptr<NcclSession>& session, NcclChannel& channel,
                             const Call& call, std::size_t bytes) {
  NcclRank& rank = session->rank;
  const std::size_t room = std::max<std::size_t>(bytes, 1);  // of nothing, NCCL makes an error
  // What the ranks agree on must not queue up behind a collective that waits for computation.
  session->watchdog.drain(channel);
  Registration registration;
  std::string failure;
  try {
    registration.memory = take(rank, room);
    check_cuda(cudaMemsetAsync(registration.memory.get(), 0, room, session->set_up(channel)),
               "cudaMemsetAsync");
  } catch (const CudaError& error) {
    failure = error.what();
  }
  // Also: nobody writes into another's memory before it is zero.
  if (!session->agree(channel, call, failure.empty())) {
    if (failure.empty()) failure = "another rank has not so much memory";
    rank.fail(describe(call) + ": " + failure);
    rank.check();
  }

  void* data = registration.memory.get();
  std::string reason;
  const char* taken = "window";
  registration.window = register_window(*session, channel, call, data, room, reason);
  if (registration.window == nullptr) {
    taken = "buffer";
    registration.buffer = register_buffer(*session, channel, call, data, room, reason);
    if (registration.buffer == nullptr) taken = "plain";
    reason += std::string(": ") + (registration.buffer ? "buffer registration" : "plain memory");
  }
  auto memory =
      std::make_shared<NcclMemory>(session, channel, channel.keep(std::move(registration)), bytes);
  return {std::move(memory), taken, std::move(reason)};
}

}  // namespace shardcomm
