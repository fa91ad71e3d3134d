// Ctrl-C during a wait: long waits come back at this interval and let Python's signal handlers run.
#pragma once

#include <chrono>

#include "bindings/bindings.h"

namespace shardcomm::bindings {

constexpr std::chrono::milliseconds kInterruptInterval{100};

// Under the interpreter's lock. Throws what a handler raised, so KeyboardInterrupt for Ctrl-C.
inline void check_interrupt() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace shardcomm::bindings
