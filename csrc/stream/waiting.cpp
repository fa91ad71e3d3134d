#include "stream/waiting.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "stream/fork.h"

namespace shardcomm {

// Held over a fork, so that the child finds it whole; the child's own threads are all new.
struct Threads {
  Threads();

  // What `one` waits for; null, if it goes on.
  const WaitsFor* wait_of(ThreadId one) const {
    const WaitsFor* wait = waits;
    while (wait != nullptr && wait->self_ != one) wait = wait->next_;
    // One that is awake may only not have run yet.
    return wait != nullptr && wait->done_.load() == 0 ? wait : nullptr;
  }
  // Whether `one` is `other`, or waits for it.
  bool leads_to(ThreadId one, ThreadId other) const {
    for (int hops = 0; hops <= num_waits; ++hops) {  // not for ever: there may be rings
      if (one == other) return true;
      const WaitsFor* wait = wait_of(one);
      if (wait == nullptr) return false;
      one = wait->other_;
    }
    return false;
  }
  void add(WaitsFor* wait) {
    wait->next_ = waits;
    waits = wait;
    ++num_waits;
  }
  void remove(const WaitsFor* wait) {
    WaitsFor** at = &waits;
    while (*at != nullptr && *at != wait) at = &(*at)->next_;
    if (*at == nullptr) return;  // this is a child, and the wait was its parent's
    *at = wait->next_;
    --num_waits;
  }

  std::mutex mutex;
  WaitsFor* waits = nullptr;  // the latest first
  int num_waits = 0;
  std::list<WorksForOthers::Entry> workers;
};

namespace {

// Never destroyed: threads may still wait while the process ends.
Threads& threads() {
  static Threads& only = *new Threads;
  return only;
}

using Lock = std::lock_guard<std::mutex>;

thread_local ThreadId own_id = 0;
thread_local ThreadId works_for = 0;

ThreadId this_thread() {
  if (own_id == 0) own_id = new_thread_id();
  return own_id;
}

}  // namespace

Threads::Threads() {
  at_fork([] { threads().mutex.lock(); }, [] { threads().mutex.unlock(); },
          [] {
            threads().waits = nullptr;
            threads().num_waits = 0;
            threads().workers.clear();
            threads().mutex.unlock();
          });
}

namespace {

// As the library is loaded: a child that was forked while a thread makes it would wait for that
// thread for ever.
const bool threads_are_made = (threads(), true);

}  // namespace

ThreadId new_thread_id() {
  static std::atomic<ThreadId> last{0};
  return ++last;
}

void take_thread_id(ThreadId id) { own_id = id; }

WaitsFor::WaitsFor(ThreadId other, const Atomic<std::uint32_t>& done)
    : self_(this_thread()), other_(other), done_(done) {
  const Lock lock(threads().mutex);
  threads().add(this);
}

WaitsFor::~WaitsFor() {
  const Lock lock(threads().mutex);
  threads().remove(this);
}

bool WaitsFor::is_endless() const {
  const Lock lock(threads().mutex);
  // Who is seen to wait for this thread may have fired `done_` before that.
  return threads().leads_to(other_, self_) && done_.load() == 0;
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
  if (!threads().leads_to(user, self)) return false;
  for (const WorksForOthers::Entry& worker : threads().workers) {
    if (!threads().leads_to(worker.id, self) && worker.has_work()) return false;
  }
  return true;
}

}  // namespace shardcomm
