// What is asked of communicators in every call, and how the hosts of the ranks meet.
#include "fake_nccl/comm.h"

#include <algorithm>

namespace fake_nccl {

// The abort flag is looked at now and then (misc/socket.cc, ncclSocketAccept and its like), so the
// thread is in the call for a while after it was raised.
Result brought_back() {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return internal_error;
}

Result wait_for_abort(Comm* comm) {
  const Waiting waiting(controls().hosts_waiting);
  std::unique_lock<std::mutex> lock(comm->world->mutex);
  comm->world->changed.wait(lock, [comm] { return comm->abort_flag.load(); });
  lock.unlock();
  return brought_back();
}

bool known(const Comm* comm) {
  int FakeNcclCounts::* wrong = &FakeNcclCounts::bad_arguments;
  {
    const std::lock_guard<std::mutex> lock(controls().mutex);
    for (const auto& each : controls().comms) {
      if (each.get() != comm) continue;
      if (!comm->ended) return true;
      wrong = &FakeNcclCounts::calls_after_end;
    }
  }
  count(wrong);
  return false;
}

// ncclCommGetAsyncError: what a non-blocking group has become, or what the proxy's thread saw.
Result async_error(Comm* comm, int* state) {
  *state = comm->state;
  if (*state == success && kReportsProxyErrors) *state = comm->proxy_error;
  if (*state == success) finish_group_job(comm);
  return success;
}

Result ensure_ready(Comm* comm) {
  if (comm->abort_flag) {
    finish_group_job(comm);
    return success;
  }
  int state = success;
  async_error(comm, &state);
  if (state == in_progress) {
    count(&FakeNcclCounts::calls_in_progress);
    return invalid_argument;
  }
  return static_cast<Result>(state);
}

InCall::InCall(Comm* comm) : comm_(comm) {
  std::unique_lock<std::mutex> lock(comm->mutex);
  ++comm->callers[std::this_thread::get_id()];
  const bool alone = comm->callers.size() == 1;
  lock.unlock();
  if (!alone) count(&FakeNcclCounts::concurrent_calls);
}

InCall::~InCall() {
  const std::lock_guard<std::mutex> lock(comm_->mutex);
  const auto mine = comm_->callers.find(std::this_thread::get_id());
  if (--mine->second == 0) comm_->callers.erase(mine);
  comm_->changed.notify_all();
}

Result meet(Comm* comm, const std::vector<std::string>& places, int needed) {
  World& world = *comm->world;
  const Waiting waiting(controls().hosts_waiting);
  std::unique_lock<std::mutex> lock(world.mutex);
  for (const std::string& place : places) world.came[place].insert(comm->rank);
  world.changed.notify_all();
  world.changed.wait(lock, [&] {
    return comm->abort_flag.load() ||
           std::all_of(places.begin(), places.end(), [&](const std::string& place) {
             return static_cast<int>(world.came[place].size()) >= needed;
           });
  });
  lock.unlock();
  return comm->abort_flag ? brought_back() : success;
}

Result connect(Comm* comm, std::vector<std::string> places, int needed) {
  const auto known = [comm](const std::string& place) { return comm->connected.count(place) > 0; };
  places.erase(std::remove_if(places.begin(), places.end(), known), places.end());
  if (places.empty()) return success;
  if (hits(faults().never_connects, comm->rank)) return wait_for_abort(comm);
  const Result result = meet(comm, places, needed);
  if (result == success) comm->connected.insert(places.begin(), places.end());
  return result;
}

void set_abort(Comm* comm) {
  comm->abort_flag = true;
  {
    const std::lock_guard<std::mutex> lock(comm->world->mutex);
    comm->world->changed.notify_all();
  }
  if (Comm* child = comm->child) set_abort(child);
}

}  // namespace fake_nccl
