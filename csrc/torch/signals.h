// Ctrl-C ends a long wait of Python's main thread; and the errors of waits.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

#include "shardcomm.h"

namespace shardcomm_torch {

namespace py = pybind11;

// How long waits are between two looks at signals.
constexpr std::chrono::milliseconds kWaitSlice{50};

// A wait's own timeout has passed, and the collective goes on. TimeoutError in Python.
class TimedOut : public std::runtime_error {
 public:
  explicit TimedOut(std::chrono::milliseconds timeout)
      : std::runtime_error("the collective has not ended within " +
                           std::to_string(timeout.count()) + " ms; it goes on") {}
};

// Runs Python's signal handlers, if this is its main thread. Throws what a handler raises.
inline void throw_if_interrupted() {
  if (syscall(SYS_gettid) != getpid()) return;
  const py::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// While alive, other threads may have the interpreter.
class OthersRun {
 public:
  OthersRun() {
    if (PyGILState_Check() != 0) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// Runs `call`, in which long waits inside the C library do that.
template <class Call>
void interruptibly(Call&& call) {
  struct Check {
    std::exception_ptr raised;

    Check() { shc_set_wait_check(run, this); }
    ~Check() { shc_set_wait_check(nullptr, nullptr); }

    static int run(void* check) {
      try {
        throw_if_interrupted();
        return 0;
      } catch (...) {
        static_cast<Check*>(check)->raised = std::current_exception();
        return 1;
      }
    }
  } check;
  try {
    call();
  } catch (...) {
    if (check.raised) std::rethrow_exception(check.raised);
    throw;
  }
}

}  // namespace shardcomm_torch
