// Which NCCL is played, and where its versions differ. All versions are made of the same objects
// but for version.cpp; a function that a version lacks is not among the symbols of its library
// (CMakeLists.txt). Sources read: tags v2.18.3-1, v2.22.3-1, v2.27.7-1, v2.28.9-1, v2.29.7-1,
// v2.30.7-1. Of 2.32.3 there are its header and its symbols; where these do not tell, it is played
// as 2.30.7.
#pragma once

#include <cstddef>

namespace fake_nccl {

// What ncclGetVersion says. Hidden: of two versions in a process, each has its own.
__attribute__((visibility("hidden"))) extern const int kVersion;

// init.cc, ncclCommAbort and ncclCommDestroy: a job of the group frees the communicator since 2.22
// (ncclAsyncLaunch(commReclaim)); before, the call itself, whatever group it is in.
const bool kReclaimsInGroup = kVersion >= 22200;

// group.cc, ncclCollPreconnectFunc: since 2.22 the first collective of each algorithm connects.
// Before, initTransportsRank did (init.cc).
const bool kConnectsLazily = kVersion >= 22200;

// group.cc, ncclGroupEndInternal of 2.18: a non-blocking group with nothing to connect and no job
// is launched by the caller. Later, always by a thread made for it.
const bool kLaunchesInCaller = kVersion < 21900;

// init.cc, ncclCommGetAsyncError: 2.18 looks at comm->asyncResult only, which the proxy's thread
// does not set (proxy.cc); later also at proxyState->asyncResult.
const bool kReportsProxyErrors = kVersion >= 21900;

// nccl.h, ncclConfig_t. init.cc, parseCommConfig: copies as many bytes as both sides know.
const std::size_t kConfigBytes = kVersion < 22700   ? 48
                                 : kVersion < 22800 ? 72
                                 : kVersion < 22900 ? 80
                                 : kVersion < 23100 ? 96
                                                    : 120;
// parseCommConfig: 2.27 refuses NCCL_CTA_POLICY_ZERO.
const int kMaxCtaPolicy = kVersion < 22800 ? 1 : 2;

// ncclCommWindowRegister where ranks do not reach each other's memory.
enum class WithoutSymmetry {
  structure,     // 2.27 register/register.cc: a window structure around the local registration
  local_handle,  // 2.28 dev_runtime.cc, ncclDevrWindowRegisterInGroup: the registration's handle
  null           // 2.29 dev_runtime.cc, ncclCommWindowRegister: null, and nothing is registered
};
const WithoutSymmetry kWithoutSymmetry = kVersion < 22800   ? WithoutSymmetry::structure
                                         : kVersion < 22900 ? WithoutSymmetry::local_handle
                                                            : WithoutSymmetry::null;
// 2.27 register/register.cc: the structure is there when the call returns, and the group's result
// is returned. Later the window is null until it is registered, and success is returned.
const bool kWindowAtOnce = kVersion < 22800;

// init.cc, symmetricSupport: 2.27 wants one node; 2.28 asks about each node alone; since 2.29 all
// ranks must reach each other (or the network, which is not played).
const bool kSymmetricOnSeveralNodes = kVersion >= 22800 && kVersion < 22900;

// sym_kernels.cc, ncclSymkPickKernel: since 2.30 a reduce-scatter needs its source in a window
// only, and a gather its destination only.
const bool kOneWindowIsEnough = kVersion >= 23000;

// device/prims_simple.h: kernels look at the abort flag, those of symmetric memory since 2.29.7
// (nccl_device/impl/lsa_barrier__funcs.h, testAbort). Nothing ends what copy engines wait for
// (ce_coll.cc).
const bool kAbortsSymmetric = kVersion >= 22907;

// enqueue.cc, NCCL_P2P_LL_THRESHOLD: up to 16 KiB a channel, of which a pair of ranks has one here,
// messages go by the protocol LL, which knows no registration. For broadcasts, whose protocol NCCL
// chooses by what it costs, the same bound is played.
const std::size_t kMostByLl = 16384;

// register/coll_reg.cc, ncclRegisterCollBuffers, ring: both sides of a broadcast must be
// registered; since 2.29 on one node `recv` alone.
const bool kRecvIsEnough = kVersion >= 22900;

}  // namespace fake_nccl
