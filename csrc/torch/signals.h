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

// While alive, other threads may have the interpreter, unless that has ended.
class OthersRun {
 public:
  OthersRun() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// While alive, long waits of this thread inside the C library run signal handlers. A handler may
// make another one, in a collective of another group.
class WaitCheck {
 public:
  WaitCheck() { set(this); }
  ~WaitCheck() { set(outer_); }
  WaitCheck(const WaitCheck&) = delete;
  WaitCheck& operator=(const WaitCheck&) = delete;

  // What a handler has raised.
  const std::exception_ptr& raised() const { return raised_; }

 private:
  static void set(WaitCheck* check) {
    innermost = check;
    shc_set_wait_check(check == nullptr ? nullptr : run, check);
  }

  static int run(void* check) {
    try {
      throw_if_interrupted();
      return 0;
    } catch (...) {
      static_cast<WaitCheck*>(check)->raised_ = std::current_exception();
      return 1;
    }
  }

  inline static thread_local WaitCheck* innermost = nullptr;

  WaitCheck* const outer_ = innermost;
  std::exception_ptr raised_;
};

// Runs `call`, whose long waits inside the C library can be interrupted.
template <class Call>
void interruptibly(Call&& call) {
  const WaitCheck check;
  try {
    call();
  } catch (...) {
    if (check.raised()) std::rethrow_exception(check.raised());
    throw;
  }
}

}  // namespace shardcomm_torch
