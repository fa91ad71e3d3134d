#include "stream/waiting.h"

#include <pthread.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace shardcomm {
namespace {

using Id = std::thread::id;

struct Threads {
  std::mutex mutex;
  std::unordered_map<Id, Id> waits_for;
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

thread_local Id works_for;

bool waits_for(const Threads& all, Id one, Id other) {
  // Not for ever: threads may wait for each other in a ring.
  for (std::size_t hops = 0; hops <= all.waits_for.size(); ++hops) {
    if (one == other) return true;
    const auto found = all.waits_for.find(one);
    if (found == all.waits_for.end()) return false;
    one = found->second;
  }
  return false;
}

}  // namespace

WaitsFor::WaitsFor(Id other) {
  const Lock lock(threads().mutex);
  threads().waits_for[std::this_thread::get_id()] = other;
}

WaitsFor::~WaitsFor() {
  const Lock lock(threads().mutex);
  threads().waits_for.erase(std::this_thread::get_id());
}

OnBehalfOf::OnBehalfOf(Id caller) : before_(works_for) { works_for = caller; }
OnBehalfOf::~OnBehalfOf() { works_for = before_; }

Id caller() { return works_for == Id() ? std::this_thread::get_id() : works_for; }

WorksForOthers::WorksForOthers(Id id, HasWorkOf has_work_of) {
  const Lock lock(threads().mutex);
  entry_ = threads().workers.insert(threads().workers.end(), {id, std::move(has_work_of)});
}

WorksForOthers::~WorksForOthers() {
  const Lock lock(threads().mutex);
  threads().workers.erase(entry_);
}

bool is_stuck(Id user) {
  const Id self = std::this_thread::get_id();
  const Lock lock(threads().mutex);
  if (!waits_for(threads(), user, self)) return false;
  for (const WorksForOthers::Entry& worker : threads().workers) {
    if (!waits_for(threads(), worker.id, self) && worker.has_work_of(user)) return false;
  }
  return true;
}

}  // namespace shardcomm
