// Which thread waits for which. It tells a rank that is stuck from one that may still come: a
// thread that waits for a stream calls nothing until that stream's worker is done.
#pragma once

#include <cstdint>
#include <functional>
#include <list>

#include "stream/futex.h"

namespace shardcomm {

// Names a thread for good, where a std::thread::id may be given to another one. 0: none.
using ThreadId = std::uint64_t;
ThreadId new_thread_id();
// From now on, the name of this thread.
void take_thread_id(ThreadId id);

// While alive, this thread waits for what `other` does, until `done` is not 0.
class WaitsFor {
 public:
  WaitsFor(ThreadId other, const Atomic<std::uint32_t>& done);
  ~WaitsFor();
  WaitsFor(const WaitsFor&) = delete;
  WaitsFor& operator=(const WaitsFor&) = delete;
};

// While alive, this thread works for `caller`, who gave it what it does.
class OnBehalfOf {
 public:
  explicit OnBehalfOf(ThreadId caller);
  ~OnBehalfOf();
  OnBehalfOf(const OnBehalfOf&) = delete;
  OnBehalfOf& operator=(const OnBehalfOf&) = delete;

 private:
  ThreadId before_;
};

// The thread that this one works for; itself, if for nobody.
ThreadId caller();

// While alive, thread `id` does what others give it; `has_work` tells whether any of that is not
// done.
class WorksForOthers {
 public:
  using HasWork = std::function<bool()>;
  WorksForOthers(ThreadId id, HasWork has_work);
  ~WorksForOthers();
  WorksForOthers(const WorksForOthers&) = delete;
  WorksForOthers& operator=(const WorksForOthers&) = delete;

  struct Entry {
    ThreadId id;
    HasWork has_work;
  };

 private:
  std::list<Entry>::iterator entry_;
};

// Whether `user` can do nothing before this thread has ended what it does now, nor anything that
// was given to a stream: `user`, and every stream's thread that has work, is this thread or waits
// for it, maybe by way of others.
bool is_stuck(ThreadId user);

}  // namespace shardcomm
