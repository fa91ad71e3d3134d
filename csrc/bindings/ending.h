// The end of the interpreter, which waits for Python that other threads still run.
#pragma once

#include "stream/fork.h"

namespace shardcomm::bindings {

// Whether the interpreter is ending: no more Python is to begin on other threads.
bool is_ending();

// Whether any `Held` lives.
bool any_held();

// While one lives, the interpreter does not end, so that a thread may run Python or let go of it.
// Who begins to do so holds one first, and then asks `is_ending`.
class Held {
 public:
  Held();
  ~Held();
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  const int made_at_ = forks();
};

}  // namespace shardcomm::bindings
