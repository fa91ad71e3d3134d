// Waits without the interpreter's lock: those that Ctrl-C ends, and those of destructors.
#pragma once

#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/lock.h"
#include "stream/wait_check.h"

namespace shardcomm::bindings {

// What a signal handler raised.
class Interrupted final : public py::error_already_set, public Interruption {};

// In this scope other Python threads run, and long waits of this one let signal handlers run: what
// a handler raises, as Ctrl-C does, ends the wait.
class InterruptibleWait {
 private:
  WithoutLock release_;
  WaitCheck check_{[] {
    with_lock([] {
      if (PyErr_CheckSignals() != 0) throw Interrupted();
    });
  }};
};

// For what a destructor may wait for: another thread, which may want the lock, or a device.
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
