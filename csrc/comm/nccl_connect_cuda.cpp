// How an NCCL communicator comes about.
#include <stdexcept>
#include <string>

#include "comm/nccl_communicator.h"
#include "shardcomm/nccl.h"

namespace shardcomm {
namespace {

void check(int device, const CommOptions& options) {
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
}

// A call on a communicator that is not ours yet.
void check_nccl(const nccl::Library& nccl, nccl::Result result, const char* what) {
  if (result == nccl::kSuccess) return;
  throw CudaError(std::string(what) + ": " + nccl.get_error_string(result) + " (" +
                  nccl.get_last_error(nullptr) + ")");
}

template <class Connect>
std::shared_ptr<Communicator> open(const std::shared_ptr<NcclSession>& session, Connect&& connect) {
  try {
    connect(*session);
    return std::make_shared<NcclCommunicator>(session);
  } catch (...) {
    // No watchdog yet, and nobody else in a call: here.
    session->rank.fail("the ranks did not connect");
    session->watchdog.abort_all();
    throw;
  }
}

}  // namespace

std::string nccl_unique_id() {
  const nccl::Library& nccl = nccl::library();
  nccl::UniqueId id;
  check_nccl(nccl, nccl.get_unique_id(&id), "ncclGetUniqueId");
  return {id.bytes, sizeof(id.bytes)};
}

std::shared_ptr<Communicator> make_nccl(const std::string& unique_id, int rank, int size,
                                        int device, const CommOptions& options) {
  if (unique_id.size() != sizeof(nccl::UniqueId)) {
    throw std::invalid_argument("nccl: unique_id has " + std::to_string(unique_id.size()) +
                                " bytes; nccl_unique_id makes one, of 128");
  }
  if (rank < 0 || rank >= size) {
    throw std::invalid_argument("nccl: rank is " + std::to_string(rank) + " of " +
                                std::to_string(size) + "; it must be 0 to size - 1");
  }
  const nccl::Library& nccl = nccl::library();
  check(device, options);
  const DeviceScope scope(device);
  return open(std::make_shared<NcclSession>(nccl, rank, size, device, options.deadline_s),
              [&](NcclSession& session) { session.connect(unique_id); });
}

std::shared_ptr<Communicator> borrow_nccl(std::uintptr_t comm, int device,
                                          const CommOptions& options) {
  if (comm == 0) throw std::invalid_argument("nccl: comm is null; it must be an ncclComm_t");
  const nccl::Library& nccl = nccl::library();
  check(device, options);
  auto* borrowed = reinterpret_cast<nccl::Comm>(comm);
  int rank = 0;
  int size = 0;
  int its_device = 0;
  check_nccl(nccl, nccl.comm_user_rank(borrowed, &rank), "ncclCommUserRank");
  check_nccl(nccl, nccl.comm_count(borrowed, &size), "ncclCommCount");
  check_nccl(nccl, nccl.comm_cu_device(borrowed, &its_device), "ncclCommCuDevice");
  if (its_device != device) {
    throw std::invalid_argument("nccl: device is " + std::to_string(device) +
                                ", but the communicator's is " + std::to_string(its_device));
  }
  const DeviceScope scope(device);
  return open(std::make_shared<NcclSession>(nccl, rank, size, device, options.deadline_s),
              [&](NcclSession& session) { session.split(borrowed); });
}

}  // namespace shardcomm
