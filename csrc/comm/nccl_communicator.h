// The collectives of the `nccl` transport.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "comm/nccl_session.h"
#include "cuda/scratch.h"
#include "shardcomm/communicator.h"

namespace shardcomm {

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclSession> session);
  ~NcclCommunicator() override;

  int rank() const override { return session_->rank; }
  int size() const override { return session_->size; }
  std::string transport() const override { return "nccl"; }
  std::shared_ptr<Memory> allocate(std::size_t bytes, Use use) override;
  void name_tag(std::int64_t tag, const std::string& name) override {
    session_->names->set(tag, name);
  }
  void abort(const std::string& reason) noexcept override;
  void close() noexcept override { session_->close(); }
  void check() const override { session_->check(); }
  std::vector<Receipt> receipts() const override;
  std::vector<Pending> pending() const override { return session_->pending(); }

 private:
  void run_all_gather(const void* send, DType send_dtype, void* recv, DType recv_dtype,
                      const Parts& parts, std::int64_t tag, NativeStream stream) override;
  void run_reduce_scatter(const void* send, DType dtype, void* recv, const Epilogue& epilogue,
                          const Parts& parts, RedOp op, std::int64_t tag,
                          NativeStream stream) override;
  void run_all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op, std::int64_t tag,
                      NativeStream stream) override;
  void run_broadcast(void* buffer, DType dtype, std::int64_t count, int root,
                     NativeStream stream) override;
  void run_barrier(std::int64_t tag, NativeStream stream) override;
  // These throw std::invalid_argument, which says what to call instead.
  void run_all_to_all(const void* send, const Parts& send_parts, void* recv,
                      const Parts& recv_parts, DType dtype, std::int64_t tag,
                      NativeStream stream) override;
  void run_gather(const void* send, void* recv, DType dtype, std::int64_t count, int root,
                  std::int64_t tag, NativeStream stream) override;
  void run_scatter(const void* send, void* recv, DType dtype, std::int64_t count, int root,
                   std::int64_t tag, NativeStream stream) override;
  void run_reduce(const void* send, void* recv, DType dtype, std::int64_t count, RedOp op, int root,
                  std::int64_t tag, NativeStream stream) override;

  struct Path {
    const char* requested;
    const char* taken;
    const char* reason;
  };
  static constexpr Path kDirect{"nccl", "nccl", ""};

  // Gives `call` its number, and watches the work that launch(use, stream) puts on the stream.
  template <class Launch>
  void run(NcclChannel& channel, Call& call, NativeStream stream, const Path& path,
           Launch&& launch);
  void skip(NcclChannel& channel, Call& call, const Path& path);
  void took(const Call& call, const char* requested, const char* taken, std::string_view reason);

  class Messages;
  // Where `use` receives what ranks send out of `memory`: as many bytes. Null where it cannot be
  // made, in a capture.
  void* inbox_of(NcclUse& use, Registered& memory);

  // The three ways of a reduce-scatter.
  void reduce(NcclUse& use, const Call& call, const Parts& parts, const void* send, void* recv,
              const Epilogue& epilogue, cudaStream_t stream);
  void exchange(NcclUse& use, const Call& call, const Parts& parts, const void* send, void* recv,
                const Epilogue& epilogue, cudaStream_t stream);
  void reduce_by_nodes(NcclUse& use, const Call& call, const Parts& parts, const void* send,
                       void* recv, const Epilogue& epilogue, cudaStream_t stream);

  std::shared_ptr<NcclSession> session_;
  const nccl::Library& nccl_;
  ScratchPool scratch_;
  mutable std::mutex receipts_mutex_;
  std::array<Receipt, kOps> receipts_;
};

// The memory of `channel` in which `bytes` from `data` on lie; null if there is none.
std::shared_ptr<Registered> registered_at(const NcclChannel& channel, const void* data,
                                          std::size_t bytes);

template <class Launch>
void NcclCommunicator::run(NcclChannel& channel, Call& call, NativeStream native, const Path& path,
                           Launch&& launch) {
  const DeviceScope scope(session_->device);
  auto* stream = static_cast<cudaStream_t>(native);
  NcclUse use(*session_, channel, call);
  try {
    use.begin(stream);
    launch(use, stream);
    use.end(stream);
  } catch (const CudaError& error) {
    // The other ranks wait for this one, and must hear of it.
    session_->fail("backend", session_->describe(call) + ": " + error.what(), call);
    throw;
  } catch (const CommError&) {
    throw;
  } catch (...) {
    session_->fail("aborted", session_->describe(call) + " was interrupted", call);
    throw;
  }
  took(call, path.requested, path.taken, path.reason);
}

}  // namespace shardcomm
