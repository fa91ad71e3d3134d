// How the C functions report: no exception leaves them, and what went wrong is kept for the thread.
#pragma once

#include <pthread.h>

#include <type_traits>

#include "shardcomm.h"

namespace shardcomm::abi {

// Lets no pthread_cancel end the thread for as long as this lives: the core's waits and destructors
// cannot be left by it. A thread that was cancelled meanwhile ends after the call.
class Uncancelled {
 public:
  Uncancelled() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~Uncancelled() { pthread_setcancelstate(before_, nullptr); }
  Uncancelled(const Uncancelled&) = delete;
  Uncancelled& operator=(const Uncancelled&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

// Keeps the exception that is being handled as this thread's last error.
shc_status keep_error(const char* function) noexcept;

// Runs `body` as the C function of this name. It returns a status, or nothing, which is SHC_OK.
template <class Body>
shc_status guarded(const char* function, Body&& body) {
  const Uncancelled uncancelled;
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      return SHC_OK;
    } else {
      return body();
    }
  } catch (...) {
    return keep_error(function);
  }
}

}  // namespace shardcomm::abi
