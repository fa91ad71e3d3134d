// Groups of calls, after group.cc: calls of a thread are collected until its outermost group ends,
// which then runs jobs (init, destroy), connects, registers windows, and launches kernels. Where
// the communicators block, the caller does that; else a thread made for it.
#include <algorithm>

#include "fake_nccl/comm.h"

namespace fake_nccl {
namespace {

using Comms = std::vector<Comm*>;

void add(Comms& comms, Comm* comm) {
  if (std::find(comms.begin(), comms.end(), comm) == comms.end()) comms.push_back(comm);
}

// All that the group concerns and does not destroy.
Comms concerned(const GroupJob& job) {
  Comms comms;
  for (const Job& each : job.jobs) {
    if (!each.destroys) add(comms, each.comm);
  }
  for (const WindowTask& each : job.windows) add(comms, each.comm);
  for (const Task& each : job.tasks) add(comms, each.comm);
  return comms;
}

bool has_messages(const GroupJob& job) {
  return std::any_of(job.tasks.begin(), job.tasks.end(),
                     [](const Task& task) { return !task.work.messages.empty(); });
}

// asyncJobLaunch: several jobs are a thread each, and one that fails aborts the others.
Result run_jobs(const std::vector<Job>& jobs) {
  if (jobs.size() == 1) return jobs.front().run();
  std::mutex mutex;
  Result first = success;
  std::vector<std::thread> threads;
  for (const Job& job : jobs) {
    threads.emplace_back([&] {
      fake::current_device = job.comm->device;
      const Result result = job.run();
      if (result == success) return;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (first == success) first = result;
      }
      for (const Job& other : jobs) {
        if (!other.destroys) set_abort(other.comm);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

// ncclCommSetAsyncError, for those that do not block.
void set_states(const Comms& comms, Result result) {
  for (Comm* comm : comms) {
    if (!comm->blocking) comm->state = result;
  }
}

Result group_launch(GroupJob& group) {
  const Comms comms = concerned(group);
  std::vector<Job> jobs = std::move(group.jobs);
  // ncclP2PPreconnect: before everything else, with the jobs.
  for (const Task& task : group.tasks) {
    if (task.work.messages.empty()) continue;
    jobs.push_back({task.comm, [&task] { return connect_for(task.comm, task.work); }, false});
  }
  Result result = jobs.empty() ? success : run_jobs(jobs);
  for (const WindowTask& task : group.windows) {
    if (result == success) result = task.run();
  }
  // ncclCollPreconnect: one communicator after the other.
  for (const Task& task : group.tasks) {
    if (result == success && task.work.messages.empty()) {
      result = connect_for(task.comm, task.work);
    }
  }
  if (result == success) {
    for (Task& task : group.tasks) launch(task.comm, std::move(task.work), task.stream);
  }
  set_states(comms, result);
  return result;
}

}  // namespace

Group& group() {
  static thread_local Group mine;
  return mine;
}

void group_start() { ++group().depth; }

Result group_error(Result result) {
  if (group().depth > 0 && result != success && result != in_progress) group().error = result;
  return result;
}

// ncclGroupEndInternal
Result group_end() {
  Group& mine = group();
  if (mine.depth == 0) return invalid_usage;
  if (--mine.depth > 0) return success;
  const Group ended = std::exchange(mine, Group());
  GroupJob& job = *ended.job;
  const Comms comms = concerned(job);
  if (ended.error != success) {  // groupCleanup: nothing is launched
    set_states(comms, ended.error);
    return ended.error;
  }
  if (job.jobs.empty() && job.windows.empty() && job.tasks.empty()) return success;
  const bool in_caller = kLaunchesInCaller && job.jobs.empty() && !has_messages(job);
  if (ended.blocking == 0 && !in_caller) {
    for (Comm* comm : comms) {
      const std::lock_guard<std::mutex> lock(comm->mutex);
      comm->state = in_progress;
      comm->group_job = ended.job;
    }
    count(&FakeNcclCounts::threads);
    const std::lock_guard<std::mutex> lock(job.mutex);
    job.thread = std::thread([all = ended.job] { group_launch(*all); });
    return in_progress;
  }
  std::vector<std::unique_ptr<InCall>> calls;
  for (Comm* comm : comms) calls.push_back(std::make_unique<InCall>(comm));
  return group_launch(job);
}

// ncclAsyncLaunch
Result async_launch(Job job) {
  Group& mine = group();
  const int blocking = job.comm->blocking ? 1 : 0;
  if (job.destroys) {
    mine.blocking = 1;
  } else if (mine.blocking == -1) {
    mine.blocking = blocking;
  } else if (mine.blocking != blocking) {
    count(&FakeNcclCounts::mixed_modes);
    return invalid_argument;
  }
  mine.job->jobs.push_back(std::move(job));
  return success;
}

// The last one's mode is the group's (group.h, ncclGroupCommJoin).
void join_group(const Comm* comm) {
  const int blocking = comm->blocking ? 1 : 0;
  if (group().blocking == 1 - blocking) count(&FakeNcclCounts::mixed_modes);
  group().blocking = blocking;
}

// Joins the thread of the group, once.
void finish_group_job(Comm* comm) {
  std::shared_ptr<GroupJob> job;
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    job = std::move(comm->group_job);
    comm->group_job = nullptr;
  }
  if (!job) return;
  const std::lock_guard<std::mutex> lock(job->mutex);
  if (job->thread.joinable()) job->thread.join();
}

}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

Result ncclGroupStart() {
  group_start();
  return success;
}

Result ncclGroupEnd() {
  if (group().depth == 1 && !group().job->tasks.empty()) {
    group_error(fault_of(FakeCall::group_end, group().job->tasks.front().comm->rank));
  }
  return group_end();
}

}  // extern "C"
