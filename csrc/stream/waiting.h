// Which thread waits for which. It tells a rank that is stuck from one that may still come: a
// thread that waits for a stream calls nothing until that stream's worker is done.
#pragma once

#include <functional>
#include <list>
#include <thread>

namespace shardcomm {

// While alive, this thread waits for what `other` does.
class WaitsFor {
 public:
  explicit WaitsFor(std::thread::id other);
  ~WaitsFor();
  WaitsFor(const WaitsFor&) = delete;
  WaitsFor& operator=(const WaitsFor&) = delete;
};

// While alive, this thread works for `caller`, who gave it what it does.
class OnBehalfOf {
 public:
  explicit OnBehalfOf(std::thread::id caller);
  ~OnBehalfOf();
  OnBehalfOf(const OnBehalfOf&) = delete;
  OnBehalfOf& operator=(const OnBehalfOf&) = delete;

 private:
  std::thread::id before_;
};

// The thread that this one works for; itself, if for nobody.
std::thread::id caller();

// While alive, thread `id` does what others give it; `has_work_of(caller)` tells whether anything
// that `caller` gave it is not done.
class WorksForOthers {
 public:
  using HasWorkOf = std::function<bool(std::thread::id caller)>;
  WorksForOthers(std::thread::id id, HasWorkOf has_work_of);
  ~WorksForOthers();
  WorksForOthers(const WorksForOthers&) = delete;
  WorksForOthers& operator=(const WorksForOthers&) = delete;

  struct Entry {
    std::thread::id id;
    HasWorkOf has_work_of;
  };

 private:
  std::list<Entry>::iterator entry_;
};

// Whether neither `user` nor any thread that has work of `user`'s goes on before what this thread
// does now has ended: each of them is this thread, or waits for it, also by way of others.
bool is_stuck(std::thread::id user);

}  // namespace shardcomm
