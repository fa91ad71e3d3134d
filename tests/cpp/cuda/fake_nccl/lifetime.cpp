// Communicators: how they come about, and end. After init.cc.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "fake_nccl/comm.h"

namespace fake_nccl {
namespace {

std::mutex worlds_mutex;
std::map<std::string, std::shared_ptr<World>>& worlds() {
  static auto& all = *std::make_unique<std::map<std::string, std::shared_ptr<World>>>().release();
  return all;
}

std::shared_ptr<World> world_of(const std::string& id, int size) {
  const std::lock_guard<std::mutex> lock(worlds_mutex);
  auto& world = worlds()[id];
  if (!world) world = std::make_shared<World>(id, size);
  return world;
}

// The caller holds the controls' mutex no longer than this.
Comm* keep(std::unique_ptr<Comm> comm) {
  static std::once_flag once;
  std::call_once(once, [] {
    fake_on_free([](const void* data) {
      int freed = 0;
      Controls& all = controls();
      const std::lock_guard<std::mutex> lock(all.mutex);
      for (const auto& each : all.comms) {
        if (each->ended) continue;
        const std::lock_guard<std::mutex> registered(each->mutex);
        for (const auto& [_, registration] : each->registrations) {
          freed += registration->data == data ? 1 : 0;
        }
      }
      all.counts.freed_while_registered += freed;
    });
  });
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().comms.push_back(std::move(comm));
  return controls().comms.back().get();
}

void shape(Comm* comm, std::shared_ptr<World> world, int rank) {
  const FakeNccl set = faults();
  comm->world = std::move(world);
  comm->rank = rank;
  const int per_node = set.ranks_per_node > 0 ? set.ranks_per_node : comm->size();
  comm->nodes = (comm->size() + per_node - 1) / per_node;
  comm->cumem = set.cumem;
  comm->symmetric = kVersion >= 22700 && set.cumem && set.windows == FakeWindows::symmetric &&
                    (comm->nodes == 1 || kSymmetricOnSeveralNodes);
  comm->local_register = set.windows != FakeWindows::none;
}

// ncclCommInitRankFunc: bootstrapInit and the first all-gather, then the last barrier.
Result initialize(Comm* comm) {
  const FakeNccl set = faults();
  if (hits(set.never_inits, comm->rank)) return wait_for_abort(comm);
  if (const Result result = meet(comm, {"init"}, comm->size())) return result;
  comm->gathered = true;
  if (hits(set.never_finishes_init, comm->rank)) return wait_for_abort(comm);
  if (const Result result = meet(comm, {"init's barrier"}, comm->size())) return result;
  if (set.eager_connect) {
    if (const Result result = connect(comm, {"ring", "tree"}, comm->size())) return result;
  }
  comm->ready = true;
  return success;
}

// parseCommConfig
Result parse(Comm* comm, const Config* given) {
  constexpr int kUndefined = -2147483647 - 1;
  Config config{};
  config.size = kConfigBytes;
  config.blocking = config.cta_policy = kUndefined;
  std::memcpy(&config, given, std::min(given->size, kConfigBytes));
  if (config.magic != 0xcafebeef) return invalid_argument;
  if (config.version < 21400) config.blocking = kUndefined;
  if (config.version < 22700) config.cta_policy = kUndefined;
  if (config.blocking != kUndefined && config.blocking != 0 && config.blocking != 1) {
    return invalid_argument;
  }
  // envConfigOverride
  const char* blocking = std::getenv("NCCL_COMM_BLOCKING");
  if (blocking != nullptr && std::strlen(blocking) == 1 && (*blocking == '0' || *blocking == '1')) {
    config.blocking = *blocking - '0';
  }
  if (config.cta_policy != kUndefined &&
      (config.cta_policy < 0 || config.cta_policy > kMaxCtaPolicy)) {
    return invalid_argument;
  }
  comm->blocking = config.blocking != 0;
  comm->cta_policy = config.cta_policy == kUndefined ? 0 : config.cta_policy;
  const std::lock_guard<std::mutex> lock(controls().mutex);
  controls().counts.cta_policy = comm->cta_policy;
  return success;
}

// commDestroySync: waits for the kernels launched, and for graphs that hold some.
Result destroy_sync(Comm* comm) {
  if (!comm->ready) return success;
  std::unique_lock<std::mutex> lock(comm->mutex);
  comm->changed.wait(lock, [comm] { return comm->running == 0 && comm->graph_refs == 0; });
  return success;
}

bool in_call(Comm* comm) {
  const std::lock_guard<std::mutex> lock(comm->mutex);
  return !comm->callers.empty();
}

// commReclaim: frees the communicator, unless init did not come as far as its first all-gather
// (intraComm0 is null, and it leaks).
// `was_in_call`: a thread was in a call when the flags were set, and may be so still.
Result reclaim(Comm* comm, bool was_in_call = false) {
  if (comm->ended) {
    count(&FakeNcclCounts::calls_after_end);
    return success;
  }
  finish_group_job(comm);
  if (comm->gathered) {
    if (!comm->finalized) destroy_sync(comm);
    std::unique_lock<std::mutex> lock(comm->mutex);
    const bool under_call = was_in_call || !comm->callers.empty();
    // NCCL would free memory that the other thread uses. That one is let go on.
    if (comm->abort_flag) comm->changed.wait(lock, [comm] { return comm->callers.empty(); });
    lock.unlock();
    if (under_call) count(&FakeNcclCounts::ended_under_call);
    forget_registrations(comm);
  }
  comm->ended = true;
  return success;
}

// ncclCommSplit's job: who has which color is gathered on the parent.
Result split(Comm* parent, int number, int color, int key, Comm* child, Comm** made) {
  World& world = *parent->world;
  {
    const std::lock_guard<std::mutex> lock(world.mutex);
    world.splits[number][parent->rank] = {color, key};
  }
  const std::string name = "split " + std::to_string(number);
  if (const Result result = meet(parent, {name}, world.size)) return result;
  std::vector<std::pair<int, int>> members;
  {
    const std::lock_guard<std::mutex> lock(world.mutex);
    for (const auto& [rank, chosen] : world.splits[number]) {
      if (chosen.first == color) members.emplace_back(chosen.second, rank);
    }
  }
  std::sort(members.begin(), members.end());
  const auto mine = std::find(members.begin(), members.end(), std::pair(key, parent->rank));
  shape(child,
        world_of(world.id + "/" + name + "/" + std::to_string(color),
                 static_cast<int>(members.size())),
        static_cast<int>(mine - members.begin()));
  parent->child = child;
  if (parent->abort_flag) set_abort(child);
  const Result result = initialize(child);
  parent->child = nullptr;
  __atomic_store_n(made, child, __ATOMIC_RELEASE);
  return result;
}

std::unique_ptr<Comm> make_comm() {
  auto comm = std::make_unique<Comm>();
  comm->device = fake::current_device;
  return comm;
}

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

struct Id {
  char bytes[128];
};

Result ncclGetVersion(int* version) {
  *version = kVersion;
  return success;
}

Result ncclGetUniqueId(Id* id) {
  static std::atomic<int> made{0};
  std::memset(id->bytes, 0, sizeof(id->bytes));
  std::string("id " + std::to_string(made++)).copy(id->bytes, sizeof(id->bytes) - 1);
  return success;
}

// ncclCommInitRankDev writes *newcomm before the group's end, which is where a blocking init
// blocks. An init that fails there frees nothing: its communicator is to be aborted.
Result ncclCommInitRankConfig(Comm** newcomm, int size, Id id, int rank, Config* config) {
  auto made = make_comm();
  Result result = size < 1 || rank < 0 || rank >= size ? invalid_argument : success;
  if (result == success && config != nullptr) result = parse(made.get(), config);
  if (result == success) result = fault_of(FakeCall::init, rank);
  if (result != success) {
    __atomic_store_n(newcomm, nullptr, __ATOMIC_RELEASE);
    return group_error(result);
  }
  shape(made.get(), world_of(id.bytes, size), rank);
  Comm* comm = keep(std::move(made));
  count(&FakeNcclCounts::inits);
  if (instant()) {
    comm->gathered = comm->ready = true;
    *newcomm = comm;
    return success;
  }
  if (!comm->blocking) comm->state = in_progress;
  group_start();
  const bool late = faults().late_handle;
  if (!late) __atomic_store_n(newcomm, comm, __ATOMIC_RELEASE);
  result = async_launch({comm,
                         [comm, late, newcomm] {
                           const Result done = initialize(comm);
                           if (late) __atomic_store_n(newcomm, comm, __ATOMIC_RELEASE);
                           return done;
                         },
                         false});
  if (result != success) {
    comm->ended = true;
    __atomic_store_n(newcomm, nullptr, __ATOMIC_RELEASE);
  }
  group_error(result);
  const Result ended = group_end();
  if (ended != success && ended != in_progress) return ended;
  if (result == success && !comm->blocking) {
    int state = success;
    async_error(comm, &state);
    result = static_cast<Result>(state);
  }
  return result;
}

// ncclCommInitChildComm: *newcomm is null until the split is done; a group that is in progress is
// no error to its caller, so that a non-blocking parent returns success.
Result ncclCommSplit(Comm* parent, int color, int key, Comm** newcomm, Config* config) {
  *newcomm = nullptr;
  if (!known(parent)) return invalid_argument;
  const InCall call(parent);
  group_start();
  Result result = ensure_ready(parent);
  if (result == success) {
    auto made = make_comm();
    made->device = parent->device;
    made->blocking = parent->blocking;
    if (config != nullptr) result = parse(made.get(), config);
    if (result == success) {
      shape(made.get(), parent->world, parent->rank);  // until the colors are known
      Comm* child = keep(std::move(made));
      result = async_launch({parent,
                             [=, number = parent->splits++] {
                               return split(parent, number, color, key, child, newcomm);
                             },
                             false});
    }
  }
  group_error(result);
  const Result ended = group_end();
  return ended != success && ended != in_progress ? ended : result;
}

Result ncclCommFinalize(Comm* comm) {
  if (comm == nullptr) return success;
  if (!known(comm)) return invalid_argument;
  const InCall call(comm);
  group_start();
  Result result = ensure_ready(comm);
  if (result == success && comm->finalized.exchange(true)) result = invalid_argument;
  if (result == success) {
    result = async_launch({comm, [comm] { return destroy_sync(comm); }, false});
  }
  group_error(result);
  const Result ended = group_end();
  if (ended != success && ended != in_progress) return ended;
  if (!comm->blocking) {
    int state = success;
    async_error(comm, &state);
    result = static_cast<Result>(state);
  }
  return result;
}

// An error that ncclCommEnsureReady reports leaves the function between ncclGroupStartInternal and
// ncclGroupEndInternal: this thread stays in a group (2.27.7 to 2.30.7).
Result ncclCommDestroy(Comm* comm) {
  if (comm == nullptr) return success;
  if (kReclaimsInGroup) group_start();
  Result refused = known(comm) ? success : invalid_argument;
  if (refused == success) {
    comm->destroy_flag = kReclaimsInGroup;
    refused = ensure_ready(comm);
  }
  if (refused != success) {
    if (kReclaimsInGroup) count(&FakeNcclCounts::groups_left_open);
    return refused;
  }
  count(&FakeNcclCounts::destroys);
  if (has_registrations(comm)) count(&FakeNcclCounts::registered_at_destroy);
  if (!kReclaimsInGroup) return reclaim(comm);
  const Result result = async_launch({comm, [comm] { return reclaim(comm); }, true});
  group_error(result);
  const Result ended = group_end();
  return ended != success ? ended : result;
}

// Sets the flags that blocked hosts and kernels watch; frees at the end of the group.
Result ncclCommAbort(Comm* comm) {
  if (comm == nullptr) return success;
  if (!known(comm)) return invalid_argument;
  count(&FakeNcclCounts::aborts);
  const bool at_once = !kReclaimsInGroup || faults().abort_reclaims;
  const bool was_in_call = at_once && in_call(comm);
  set_abort(comm);
  ensure_ready(comm);
  if (at_once) return reclaim(comm, was_in_call);
  group_start();
  comm->destroy_flag = true;
  const Result result = async_launch({comm, [comm] { return reclaim(comm); }, true});
  group_error(result);
  const Result ended = group_end();
  return ended != success ? ended : result;
}

Result ncclCommGetAsyncError(Comm* comm, int* state) {
  if (instant()) {
    *state = success;
    return success;
  }
  return known(comm) ? async_error(comm, state) : invalid_argument;
}

Result ncclCommCount(Comm* comm, int* size) {
  if (!known(comm)) return invalid_argument;
  *size = comm->size();
  return ensure_ready(comm);
}
Result ncclCommUserRank(Comm* comm, int* rank) {
  if (!known(comm)) return invalid_argument;
  *rank = comm->rank;
  return ensure_ready(comm);
}
Result ncclCommCuDevice(Comm* comm, int* device) {
  if (!known(comm)) return invalid_argument;
  *device = comm->device;
  return ensure_ready(comm);
}

const char* ncclGetErrorString(int result) {
  switch (result) {
    case success:
      return "no error";
    case internal_error:
      return "internal error";
    case invalid_argument:
      return "invalid argument";
    case invalid_usage:
      return "invalid usage";
    case in_progress:
      return "NCCL operation in progress";
    default:
      return "an error";
  }
}
// One text for the whole process, whatever the communicator (debug.cc, ncclLastError).
const char* ncclGetLastError(Comm*) { return ""; }

}  // extern "C"
