#include "stream/waiting.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace shardcomm {
namespace {

struct Wait {
  ThreadId other;
  const Atomic<std::uint32_t>* done;
};

struct Threads {
  std::mutex mutex;
  std::unordered_map<ThreadId, Wait> waits_for;
  std::list<WorksForOthers::Entry> workers;
};

// Never destroyed: threads may still wait while the process ends. Held over a fork, so that the
// child finds it whole; its own threads are all new.
Threads& threads() {
  static Threads& only = *new Threads;
  return only;
}

const int at_fork = pthread_atfork([] { threads().mutex.lock(); }, [] { threads().mutex.unlock(); },
                                   [] {
                                     threads().waits_for.clear();
                                     threads().workers.clear();
                                     threads().mutex.unlock();
                                   });

using Lock = std::lock_guard<std::mutex>;

thread_local ThreadId own_id = 0;
thread_local ThreadId works_for = 0;

ThreadId this_thread() {
  if (own_id == 0) own_id = new_thread_id();
  return own_id;
}

bool waits_for(const Threads& all, ThreadId one, ThreadId other) {
  // Not for ever: threads may wait for each other in a ring.
  for (std::size_t hops = 0; hops <= all.waits_for.size(); ++hops) {
    if (one == other) return true;
    const auto found = all.waits_for.find(one);
    // One that is awake may only not have run yet.
    if (found == all.waits_for.end() || found->second.done->load() != 0) return false;
    one = found->second.other;
  }
  return false;
}

}  // namespace

ThreadId new_thread_id() {
  static std::atomic<ThreadId> last{0};
  return ++last;
}

void take_thread_id(ThreadId id) { own_id = id; }

WaitsFor::WaitsFor(ThreadId other, const Atomic<std::uint32_t>& done) {
  const Lock lock(threads().mutex);
  threads().waits_for[this_thread()] = {other, &done};
}

WaitsFor::~WaitsFor() {
  const Lock lock(threads().mutex);
  threads().waits_for.erase(this_thread());
}

OnBehalfOf::OnBehalfOf(ThreadId caller) : before_(works_for) { works_for = caller; }
OnBehalfOf::~OnBehalfOf() { works_for = before_; }

ThreadId caller() { return works_for == 0 ? this_thread() : works_for; }

WorksForOthers::WorksForOthers(ThreadId id, HasWork has_work) {
  const Lock lock(threads().mutex);
  entry_ = threads().workers.insert(threads().workers.end(), {id, std::move(has_work)});
}

WorksForOthers::~WorksForOthers() {
  const Lock lock(threads().mutex);
  threads().workers.erase(entry_);
}

bool is_stuck(ThreadId user) {
  const ThreadId self = this_thread();
  const Lock lock(threads().mutex);
  if (!waits_for(threads(), user, self)) return false;
  for (const WorksForOthers::Entry& worker : threads().workers) {
    if (!waits_for(threads(), worker.id, self) && worker.has_work()) return false;
  }
  return true;
}

}  // namespace shardcomm
