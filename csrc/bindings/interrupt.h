// Waits without the interpreter's lock: waits that Ctrl-C ends, and the waits of destructors.
#pragma once

#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/lock.h"
#include "stream/wait_check.h"

namespace shardcomm::bindings {

// The Python exception that a signal handler raised during a wait.
class Interrupted final : public py::error_already_set, public Interruption {};

// In this scope, other Python threads run, and long waits of this thread let signal handlers run.
// An exception that a handler raises, as Ctrl-C's does, ends the wait.
class InterruptibleWait {
 private:
  WithoutLock release_;
  WaitCheck check_{[] {
    with_lock([] {
      if (PyErr_CheckSignals() != 0) throw Interrupted();
    });
  }};
};

// A pointer to `owned` whose destructor runs without the interpreter's lock. An object needs it if
// its destructor waits for a device, or for another thread, which may want the lock.
template <class T>
std::shared_ptr<T> destroyed_without_lock(std::shared_ptr<T> owned) {
  T* object = owned.get();
  return {object, [owned = std::move(owned)](T*) mutable {
            if (PyGILState_Check() == 0) return owned.reset();
            const WithoutLock scope;
            owned.reset();
          }};
}

}  // namespace shardcomm::bindings
