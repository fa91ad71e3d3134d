// Which thread of this process waits for which other one, and which threads work for others.
//
// A stream's thread works for whoever enqueued an operation there; a thread that waits for an event
// of a stream waits for that stream's thread, and calls nothing meanwhile. Two questions are
// answered from that: whether a wait can end at all (`WaitsFor::is_endless`), and whether a rank
// that waits in one collective may still come to another (`is_stuck`).
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

// While alive, this thread waits for what `other` does, until `done` is not 0. Takes no memory:
// destructors wait, too.
class WaitsFor {
 public:
  WaitsFor(ThreadId other, const Atomic<std::uint32_t>& done);
  ~WaitsFor();
  WaitsFor(const WaitsFor&) = delete;
  WaitsFor& operator=(const WaitsFor&) = delete;

  // Whether this wait closes a ring: `other` is this thread, or waits for it, maybe by way of
  // others. Of the threads in a ring, the last to begin its wait, at least, sees it.
  bool is_endless() const;

 private:
  friend struct Threads;
  const ThreadId self_;
  const ThreadId other_;
  const Atomic<std::uint32_t>& done_;
  WaitsFor* next_;
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
