// What comm/nccl_library.h declares of NCCL is what NCCL's own header says.
// tests/comm/test_nccl_library.py compiles it against the nccl.h of a wheel; there is nothing to
// run.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "comm/nccl_library.h"
#include "shardcomm/nccl.h"

namespace shardcomm::nccl {
namespace {

// Whether a caller passes both alike.
template <class Ours, class Theirs>
constexpr bool is_passed_alike =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
    std::is_class_v<Ours> == std::is_class_v<Theirs>;

template <class Ours, class Theirs, class = void>
constexpr bool is_called_alike = false;
template <class Result, class... Args, class TheirResult, class... TheirArgs>
constexpr bool is_called_alike<Result (*)(Args...), TheirResult (*)(TheirArgs...),
                               std::enable_if_t<sizeof...(Args) == sizeof...(TheirArgs)>> =
    is_passed_alike<Result, TheirResult> && (is_passed_alike<Args, TheirArgs> && ...);

using L = Library;
static_assert(is_called_alike<decltype(L::get_unique_id), decltype(&ncclGetUniqueId)>);
static_assert(
    is_called_alike<decltype(L::comm_init_rank_config), decltype(&ncclCommInitRankConfig)>);
static_assert(is_called_alike<decltype(L::comm_destroy), decltype(&ncclCommDestroy)>);
static_assert(is_called_alike<decltype(L::comm_abort), decltype(&ncclCommAbort)>);
static_assert(is_called_alike<decltype(L::comm_get_async_error), decltype(&ncclCommGetAsyncError)>);
static_assert(is_called_alike<decltype(L::get_error_string), decltype(&ncclGetErrorString)>);
static_assert(is_called_alike<decltype(L::get_last_error), decltype(&ncclGetLastError)>);
static_assert(is_called_alike<decltype(L::group_start), decltype(&ncclGroupStart)>);
static_assert(is_called_alike<decltype(L::group_end), decltype(&ncclGroupEnd)>);
static_assert(is_called_alike<decltype(L::all_gather), decltype(&ncclAllGather)>);
static_assert(is_called_alike<decltype(L::reduce_scatter), decltype(&ncclReduceScatter)>);
static_assert(is_called_alike<decltype(L::all_reduce), decltype(&ncclAllReduce)>);
static_assert(is_called_alike<decltype(L::broadcast), decltype(&ncclBroadcast)>);
static_assert(is_called_alike<decltype(L::reduce), decltype(&ncclReduce)>);
static_assert(is_called_alike<decltype(L::send), decltype(&ncclSend)>);
static_assert(is_called_alike<decltype(L::recv), decltype(&ncclRecv)>);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
static_assert(is_called_alike<decltype(L::mem_alloc), decltype(&ncclMemAlloc)>);
static_assert(is_called_alike<decltype(L::mem_free), decltype(&ncclMemFree)>);
static_assert(is_called_alike<decltype(L::comm_register), decltype(&ncclCommRegister)>);
static_assert(is_called_alike<decltype(L::comm_deregister), decltype(&ncclCommDeregister)>);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
static_assert(
    is_called_alike<decltype(L::comm_window_register), decltype(&ncclCommWindowRegister)>);
static_assert(
    is_called_alike<decltype(L::comm_window_deregister), decltype(&ncclCommWindowDeregister)>);
static_assert(kWindowSymmetric == NCCL_WIN_COLL_SYMMETRIC);
#endif

// Two names, one number.
constexpr bool is(int ours, int theirs) { return ours == theirs; }
static_assert(is(kSuccess, ncclSuccess) && is(kInProgress, ncclInProgress));
static_assert(is(kUint8, ncclUint8) && is(kInt32, ncclInt32) && is(kInt64, ncclInt64));
static_assert(is(kFloat16, ncclFloat16) && is(kFloat32, ncclFloat32) && is(kFloat64, ncclFloat64));
static_assert(is(kBfloat16, ncclBfloat16));
static_assert(is(kSum, ncclSum) && is(kProd, ncclProd) && is(kMax, ncclMax) && is(kMin, ncclMin));
static_assert(is(kAvg, ncclAvg));
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));

static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
static_assert(offsetof(Config, traffic_class) == offsetof(ncclConfig_t, trafficClass));
static_assert(offsetof(Config, comm_name) == offsetof(ncclConfig_t, commName));
static_assert(offsetof(Config, collnet_enable) == offsetof(ncclConfig_t, collnetEnable));
static_assert(offsetof(Config, cta_policy) == offsetof(ncclConfig_t, CTAPolicy));
static_assert(offsetof(Config, shrink_share) == offsetof(ncclConfig_t, shrinkShare));
static_assert(offsetof(Config, nvls_ctas) == offsetof(ncclConfig_t, nvlsCTAs));
static_assert(static_cast<int>(CtaPolicy::efficiency) == NCCL_CTA_POLICY_EFFICIENCY);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
static_assert(static_cast<int>(CtaPolicy::zero) == NCCL_CTA_POLICY_ZERO);
#endif
#else
static_assert(sizeof(ncclConfig_t) ==
              offsetof(Config, comm_name));  // where Config's size then ends
#endif
static_assert(Config::kUnset == NCCL_CONFIG_UNDEF_INT);

}  // namespace
}  // namespace shardcomm::nccl
