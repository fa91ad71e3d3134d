// NCCL's entry points, which are found at run time. The few declarations that are needed stand
// here: the binary interface of NCCL 2, which only grows.
#pragma once

#include <climits>
#include <cstddef>
#include <string>
#include <vector>

#include "shardcomm/stream.h"

namespace shardcomm::nccl {

// The oldest version that is accepted, and the versions that brought what older ones do not have,
// as NCCL counts them.
constexpr int kOldest = 21800;
constexpr int kBufferSince = 21900;  // ncclMemAlloc, ncclCommRegister
// From this version on ncclCommAbort inside a group only raises the abort flags, and the group's
// end frees the communicator. Before, ncclCommAbort freed it at once (init.cc, ncclCommAbort).
constexpr int kDeferredAbortSince = 22200;
constexpr int kConfigSince = 22700;   // ncclConfig_t has a CTA policy
constexpr int kWindowSince = 22700;   // ncclCommWindowRegister
constexpr int kZeroCtaSince = 22800;  // NCCL_CTA_POLICY_ZERO
// From this version on a window tells whether the ranks reach each other's memory.
constexpr int kTellingWindowSince = 22800;
std::string version_text(int version);  // "2.27.3"; "2.27" when the patch is 0

using Comm = struct OpaqueComm*;
using Window = struct OpaqueWindow*;

enum Result : int { kSuccess = 0, kInProgress = 7 };  // the others are errors
enum DataType : int {
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9
};
// kAvg runs on floats as PreMulSum, for which NCCL has no NVLS and no symmetric kernels
// (enqueue.cc, hostToDevRedOp).
enum Reduction : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as NCCL 2.27 laid it out. Before, it ended with `traffic_class`, or at its place.
// NCCL reads `size` bytes, at most as many as its own layout has. For fields that came after
// `version` it takes its own defaults (init.cc, parseCommConfig).
struct Config {
  static constexpr int kUnset = INT_MIN;
  explicit Config(int library_version)
      : size(library_version < kConfigSince ? offsetof(Config, comm_name) : sizeof(Config)),
        version(static_cast<unsigned>(library_version)) {}

  std::size_t size;
  unsigned magic = 0xcafebeef;
  unsigned version;
  int blocking = 1;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;
  const char* comm_name = nullptr;
  int collnet_enable = kUnset;
  int cta_policy = kUnset;
  int shrink_share = kUnset;
  int nvls_ctas = kUnset;
};
static_assert(sizeof(Config) == 72 && offsetof(Config, comm_name) == 48);

struct Library {
  std::string path;
  int version = 0;
  std::vector<std::string> missing;

  Result (*get_unique_id)(UniqueId*) = nullptr;
  Result (*comm_init_rank_config)(Comm*, int size, UniqueId, int rank, Config*) = nullptr;
  Result (*comm_destroy)(Comm) = nullptr;
  Result (*comm_abort)(Comm) = nullptr;
  Result (*comm_get_async_error)(Comm, Result*) = nullptr;
  const char* (*get_error_string)(Result) = nullptr;
  const char* (*get_last_error)(Comm) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;
  Result (*all_gather)(const void*, void*, std::size_t, DataType, Comm, NativeStream) = nullptr;
  Result (*reduce_scatter)(const void*, void*, std::size_t, DataType, Reduction, Comm,
                           NativeStream) = nullptr;
  Result (*all_reduce)(const void*, void*, std::size_t, DataType, Reduction, Comm,
                       NativeStream) = nullptr;
  Result (*broadcast)(const void*, void*, std::size_t, DataType, int root, Comm,
                      NativeStream) = nullptr;
  Result (*reduce)(const void*, void*, std::size_t, DataType, Reduction, int root, Comm,
                   NativeStream) = nullptr;
  Result (*send)(const void*, std::size_t, DataType, int peer, Comm, NativeStream) = nullptr;
  Result (*recv)(void*, std::size_t, DataType, int peer, Comm, NativeStream) = nullptr;

  // Null where this NCCL is too old.
  Result (*mem_alloc)(void**, std::size_t) = nullptr;
  Result (*mem_free)(void*) = nullptr;
  Result (*comm_register)(Comm, void*, std::size_t, void** handle) = nullptr;
  Result (*comm_deregister)(Comm, void* handle) = nullptr;
  Result (*comm_window_register)(Comm, void*, std::size_t, Window*, int flags) = nullptr;
  Result (*comm_window_deregister)(Comm, Window) = nullptr;

  bool aborts_in_groups() const { return version >= kDeferredAbortSince; }
};

// NCCL_WIN_COLL_SYMMETRIC: every rank uses the window at the same offsets.
constexpr int kWindowSymmetric = 1;

// The process's NCCL, loaded as nccl_status says. Throws CudaError if there is none.
const Library& library();

}  // namespace shardcomm::nccl
