// The interpreter's lock, for threads that may still run when the interpreter ends.
//
// An interpreter that has ended ends each thread that comes for its lock, by pthread_exit. That
// unwinds the thread's C++ frames, and a destructor among them that wants the lock again ends the
// process with SIGABRT. Here such a thread sleeps instead, until the process has ended; from 3.14
// on, CPython does the same.
#pragma once

#include <cxxabi.h>
#include <unistd.h>

#include "bindings/bindings.h"

namespace shardcomm::bindings {

// Runs `body`; if the interpreter ends the thread in it, the thread sleeps instead.
template <class Body>
auto or_sleep(Body&& body) {
  try {
    return body();
  } catch (const abi::__forced_unwind&) {
    while (true) pause();
  }
}

// Runs `body` with the interpreter's lock, on any thread.
template <class Body>
auto with_lock(Body&& body) {
  return or_sleep([&] {
    const py::gil_scoped_acquire lock;
    return or_sleep(body);
  });
}

// In this scope, the thread does not hold the interpreter's lock, so that other Python threads run.
class WithoutLock {
 public:
  WithoutLock() : thread_(PyEval_SaveThread()) {}
  ~WithoutLock() {
    or_sleep([this] { PyEval_RestoreThread(thread_); });
  }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  PyThreadState* thread_;
};

}  // namespace shardcomm::bindings
