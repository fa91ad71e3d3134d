// Communication memory on a device, registered with NCCL as far as it can.
#include <algorithm>
#include <utility>

#include "comm/nccl_communicator.h"

namespace shardcomm {
namespace {

constexpr std::size_t kAlignment = 128;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

class NcclMemory final : public Memory {
 public:
  NcclMemory(std::shared_ptr<NcclSession> session, NcclChannel& channel,
             std::shared_ptr<Registered> registered)
      : session_(std::move(session)), channel_(channel), registered_(std::move(registered)) {}
  ~NcclMemory() override {
    if (session_->forked()) {  // the parent's
      std::make_unique<std::shared_ptr<Registered>>(std::move(registered_)).release();
      return;
    }
    session_->let_go(channel_, std::move(registered_));
  }
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  void* data() const override { return registered_->memory.get(); }
  std::size_t bytes() const override { return registered_->bytes; }
  int device() const override { return session_->device; }

 private:
  std::shared_ptr<NcclSession> session_;
  NcclChannel& channel_;
  std::shared_ptr<Registered> registered_;
};

// NCCL's own allocator, where it has one: only that memory can be registered in every way.
std::shared_ptr<void> take(const NcclSession& session, std::size_t bytes) {
  const nccl::Library& nccl = session.nccl;
  if (nccl.mem_alloc == nullptr || nccl.mem_free == nullptr) {
    const auto memory = std::make_shared<DeviceMemory>(session.device, bytes);
    return {memory, memory->data()};
  }
  void* data = nullptr;
  const nccl::Result result = nccl.mem_alloc(&data, bytes);
  if (result != nccl::kSuccess) {
    throw CudaError(std::string("ncclMemAlloc: ") + nccl.get_error_string(result));
  }
  return {data, [&nccl, device = session.device](void* freed) {
            release_on(device, [&nccl, freed] { nccl.mem_free(freed); });
          }};
}

// What NCCL really gave, which it does not say itself: NCCL 2.28 returns the handle of a local
// registration as a window where ranks cannot reach each other's memory (dev_runtime.cc,
// ncclDevrWindowRegisterInGroup), later ones return none; only a window that they can use is an
// object on the device.
struct Registration {
  const char* taken;
  std::string reason;
  bool may_be_window;
};

Registration registration_of(const nccl::Library& nccl, const Registered& registered,
                             const std::string& refusal) {
  const std::string version = nccl::version_text(nccl.version);
  if (registered.window != nullptr && nccl.version < nccl::kTellingWindowSince) {
    return {"local",
            "nccl: " + version +
                " does not tell whether the ranks can reach each other's memory; it is "
                "registered at least locally",
            true};
  }
  if (registered.window != nullptr && device_of(registered.window) >= 0)
    return {"window", "", true};
  std::string reason = refusal;
  if (nccl.comm_window_register == nullptr) {
    reason = "nccl: window registration needs NCCL " + nccl::version_text(nccl::kWindowSince) +
             ", this is " + version;
  } else if (refusal.empty()) {
    reason = "nccl: the ranks of this system cannot all reach each other's memory";
  }
  if (registered.window != nullptr || registered.local != nullptr) {
    return {"local", reason + ": registered locally", false};
  }
  reason += nccl.comm_register == nullptr
                ? "; local registration needs NCCL " + nccl::version_text(nccl::kBufferSince)
                : "; local registration failed on a rank, or is switched off (NCCL_LOCAL_REGISTER)";
  return {"plain", reason, false};
}

// NCCL lays windows out by what each rank has registered, and where NVLink's switch reads or writes
// them all at once (NVLS), a window must lie at the same place on every rank (dev_runtime.cc,
// symMemoryObtain).
std::uint64_t windows_of(const NcclChannel& channel) {
  std::uint64_t all = 0;
  for (const auto& [_, memory] : channel.registered) {
    if (memory->window != nullptr) all += (memory->number + 1) * 0x9e3779b97f4a7c15u;
  }
  return all;
}

}  // namespace

void* NcclCommunicator::inbox_of(NcclUse& use, Registered& memory) {
  if (memory.inbox != nullptr || use.captured()) return memory.inbox.get();
  const RelaxedCapture relaxed;  // another thread may capture
  auto inbox = take(*session_, memory.bytes);
  use([&](nccl::Comm comm) {
    return nccl_.comm_register(comm, inbox.get(), memory.bytes, &memory.inbox_local);
  });
  memory.inbox = std::move(inbox);
  return memory.inbox.get();
}

std::shared_ptr<Memory> NcclCommunicator::allocate(std::size_t bytes, Use use) {
  NcclSession& session = *session_;
  NcclChannel& channel = session.channel(use);
  const DeviceScope scope(session.device);
  Call call;
  call.op = Op::allocate;
  call.root = static_cast<std::int32_t>(use);
  call.count = static_cast<std::int64_t>(bytes);
  // Outlives the use of the channel: to free it may wait for a kernel that ends only by an abort,
  // for which the watchdog may wait until nobody is in the channel.
  auto registered = std::make_shared<Registered>();
  NcclUse in_use(session, channel, call);
  try {
    // What the ranks agree on must not queue up behind a collective that waits for computation.
    in_use.drain();
    registered->number = call.sequence;
    registered->bytes = bytes;
    // NCCL's fastest reduce-scatters want their result in a window too; what comes after them takes
    // it to where it belongs.
    if (use == Use::reduce) {
      registered->landing_bytes = aligned(bytes / static_cast<std::size_t>(session.size));
    }
    const std::size_t room = aligned(std::max<std::size_t>(bytes, 1)) + registered->landing_bytes;
    std::string failure;
    try {
      registered->memory = take(session, room);
      check_cuda(cudaMemsetAsync(registered->memory.get(), 0, room,
                                 static_cast<cudaStream_t>(channel.set_up->native())),
                 "cudaMemsetAsync");
    } catch (const CudaError& error) {
      failure = error.what();
    }
    // Also: nobody writes into another's memory before it is zero.
    if (!in_use.agree(failure.empty())) {
      if (failure.empty()) failure = "another rank has not so much memory";
      session.fail("backend", session.describe(call) + ": " + failure, call);
      session.check();
    }
    void* data = registered->memory.get();
    const auto unregister = [&] {
      nccl::Window window = std::exchange(registered->window, nullptr);
      void* local = std::exchange(registered->local, nullptr);
      in_use([&](nccl::Comm comm) {
        if (window != nullptr) return nccl_.comm_window_deregister(comm, window);
        return local != nullptr ? nccl_.comm_deregister(comm, local) : nccl::kSuccess;
      });
    };
    std::string refusal;
    const bool has_windows =
        nccl_.comm_window_register != nullptr && nccl_.comm_window_deregister != nullptr;
    if (has_windows && !in_use.same_on_all(windows_of(channel))) {
      refusal =
          "nccl: the ranks hold different windows, as some have not let go of memory that others "
          "have";
    } else if (has_windows) {
      const nccl::Result result = in_use.attempt([&](nccl::Comm comm) {
        return nccl_.comm_window_register(comm, data, room, &registered->window,
                                          nccl::kWindowSymmetric);
      });
      if (!in_use.agree(result == nccl::kSuccess)) {
        refusal = std::string("nccl: window registration failed: ") +
                  (result == nccl::kSuccess ? "on another rank" : nccl_.get_error_string(result));
        unregister();
      }
    }
    if (registered->window == nullptr && nccl_.comm_register != nullptr) {
      in_use.attempt([&](nccl::Comm comm) {
        return nccl_.comm_register(comm, data, room, &registered->local);
      });
    }
    // On all ranks or on none: messages between ranks hang where one side alone is registered.
    if (nccl_.comm_register != nullptr && !in_use.agree(registered->known_to_nccl())) unregister();
    auto* begin = static_cast<std::byte*>(data);
    channel.registered.emplace(begin, registered);
    const Registration registration = registration_of(nccl_, *registered, refusal);
    registered->may_be_window = registration.may_be_window;
    if (registration.may_be_window) registered->landing = begin + aligned(bytes);
    took(call, "window", registration.taken, registration.reason);
    return std::make_shared<NcclMemory>(session_, channel, std::move(registered));
  } catch (const CommError&) {
    throw;
  } catch (...) {
    // The other ranks wait for this one.
    session.fail("aborted", session.describe(call) + " was interrupted", call);
    throw;
  }
}

}  // namespace shardcomm
