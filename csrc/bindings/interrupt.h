// Waits without the interpreter's lock, that Ctrl-C ends.
#pragma once

#include "bindings/bindings.h"
#include "stream/wait_check.h"

namespace shardcomm::bindings {

// In this scope other Python threads run, and long waits of this one let signal handlers run: what
// a handler raises, as Ctrl-C does, ends the wait.
class InterruptibleWait {
 private:
  py::gil_scoped_release release_;
  WaitCheck check_{[] {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }};
};

}  // namespace shardcomm::bindings
