// Which thread of this process waits for which other one, and which threads work for others.
//
// A stream's thread works for the thread that enqueued an operation there. A thread that waits for
// an event of a stream waits for that stream's thread, and calls nothing meanwhile. This answers
// two questions: whether a wait can end at all (`WaitsFor::is_endless`), and whether a rank that
// waits in one collective may still come to another (`is_stuck`).
#pragma once

#include <cstdint>
#include <functional>
#include <list>

#include "stream/futex.h"

namespace shardcomm {

// Names a thread for good, while a std::thread::id may later be given to another thread. 0: none.
using ThreadId = std::uint64_t;
ThreadId new_thread_id();
// Makes `id` the name of this thread from now on.
void take_thread_id(ThreadId id);

// While alive, this thread waits for `other`, until `done` is not 0. It allocates no memory, since
// destructors wait, too.
class WaitsFor {
 public:
  WaitsFor(ThreadId other, const Atomic<std::uint32_t>& done);
  ~WaitsFor();
  WaitsFor(const WaitsFor&) = delete;
  WaitsFor& operator=(const WaitsFor&) = delete;

  // Whether this wait closes a ring: `other` is this thread or waits for it, perhaps by way of
  // other threads. At least the thread in a ring that was the last to begin its wait sees the ring.
  bool is_endless() const;

 private:
  friend struct Threads;
  const ThreadId self_;
  const ThreadId other_;
  const Atomic<std::uint32_t>& done_;
  WaitsFor* next_;
};

// While alive, this thread works for `caller`, which gave it its present operation.
class OnBehalfOf {
 public:
  explicit OnBehalfOf(ThreadId caller);
  ~OnBehalfOf();
  OnBehalfOf(const OnBehalfOf&) = delete;
  OnBehalfOf& operator=(const OnBehalfOf&) = delete;

 private:
  ThreadId before_;
};

// The thread for which this thread works; this thread itself if it works for no other.
ThreadId caller();

// While alive, thread `id` does operations that others give it. `has_work` tells whether any of
// these is not done.
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

// Whether neither `user` nor any stream's operation can go on before this thread has ended its
// present operation: `user`, and every stream's thread that has work, is this thread or waits for
// it, perhaps by way of other threads.
bool is_stuck(ThreadId user);

}  // namespace shardcomm
