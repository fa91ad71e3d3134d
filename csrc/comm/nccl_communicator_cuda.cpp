// How an NCCL communicator comes about, and what is neither gather nor reduce.
#include <cstring>
#include <stdexcept>
#include <utility>

#include "comm/nccl_communicator.h"
#include "shardcomm/nccl.h"

namespace shardcomm {
namespace {

void check_device_and_options(const nccl::Library& nccl, int device, const NcclOptions& options) {
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (device < 0 || device >= devices) {
    throw std::invalid_argument("nccl: device is " + std::to_string(device) +
                                "; this process has " + std::to_string(devices) +
                                ", counted from 0");
  }
  if (!(options.deadline_s > 0)) {
    throw std::invalid_argument("nccl: deadline_s is " + std::to_string(options.deadline_s) +
                                "; it must be more than 0 seconds");
  }
  const bool zero = options.cta_policy == CtaPolicy::zero;
  const int since = zero ? nccl::kZeroCtaSince : nccl::kConfigSince;
  if (options.cta_policy != CtaPolicy::standard && nccl.version < since) {
    throw std::invalid_argument(std::string("nccl: cta_policy is '") +
                                (zero ? "zero" : "efficiency") + "', which needs NCCL " +
                                nccl::version_text(since) + "; this is " +
                                nccl::version_text(nccl.version));
  }
}

}  // namespace

std::string nccl_unique_id() {
  const nccl::Library& nccl = nccl::library();
  std::string ids;
  for (int channel = 0; channel < 2; ++channel) {
    nccl::UniqueId id;
    const nccl::Result result = nccl.get_unique_id(&id);
    if (result != nccl::kSuccess) {
      throw CudaError(std::string("ncclGetUniqueId: ") + nccl.get_error_string(result) + " (" +
                      nccl.get_last_error(nullptr) + ")");
    }
    ids.append(id.bytes, sizeof(id.bytes));
  }
  return ids;
}

std::shared_ptr<Communicator> make_nccl(const std::string& unique_id, int rank, int size,
                                        int device, const NcclOptions& options) {
  std::array<nccl::UniqueId, 2> ids;
  if (unique_id.size() != sizeof(ids)) {
    throw std::invalid_argument("nccl: unique_id has " + std::to_string(unique_id.size()) +
                                " bytes; nccl_unique_id makes one, of " +
                                std::to_string(sizeof(ids)));
  }
  std::memcpy(&ids, unique_id.data(), sizeof(ids));
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("nccl: rank is " + std::to_string(rank) + " of " +
                                std::to_string(size) + "; it must be 0 to size - 1");
  }
  const nccl::Library& nccl = nccl::library();
  check_device_and_options(nccl, device, options);
  const DeviceScope scope(device);
  const auto session = std::make_shared<NcclSession>(nccl, rank, size, device, options);
  try {
    session->connect(ids, options);
    return std::make_shared<NcclCommunicator>(session);
  } catch (...) {
    session->fail("backend", "the ranks did not connect");
    session->close();
    throw;
  }
}

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclSession> session)
    : session_(std::move(session)), nccl_(session_->nccl), scratch_(session_->device) {}

NcclCommunicator::~NcclCommunicator() { close(); }

void NcclCommunicator::skip(NcclChannel& channel, Call& call, const Path& path) {
  const NcclUse use(*session_, channel, call);
  took(call, path.requested, path.taken, path.reason);
}

void NcclCommunicator::abort(const std::string& reason) noexcept {
  try {
    session_->fail("aborted", "aborted: " + reason);
  } catch (...) {  // no memory for the text
    session_->fail("aborted", "aborted");
  }
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
  receipt.operation = shardcomm::name(call.op);
  receipt.sequence = call.sequence;
  receipt.requested = requested;
  receipt.taken = taken;
  receipt.reason = reason;
}

}  // namespace shardcomm
